//! `rekindle restore --lazy`: processes run before they have all pages of their own, and never with wrong ones.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use anyhow::{Context, bail, ensure};
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Fate, Image, Node, Result, process, stage, until};

/// The memory of its own that a program has, all of which it reads again and again.
const BALLAST_KIB: u64 = 65536;

/// Dumps and kills `steady`, which compares its own memory, in new processes too.
fn dumped(node: &Node) -> Result<(Image, PathBuf)> {
    dumped_with(node, &BALLAST_KIB.to_string())
}

fn dumped_with(node: &Node, ballast: &str) -> Result<(Image, PathBuf)> {
    let until_file = node.path("until");
    let arguments =
        ["--until", &*until_file.to_string_lossy(), "--ballast-kib", ballast, "--sleep-us", "500", "--fork-steps", "5"];
    let app = node.run("steady", &arguments)?;
    app.reaches(20)?;
    Ok((node.dump_and_kill(app)?, until_file))
}

/// Runs `rekindle restore --lazy -d` with more arguments.
fn restore(node: &Node, image: &Image, more: &[&OsStr]) -> Result<Output> {
    let mut arguments: Vec<&OsStr> = vec!["restore".as_ref(), "--lazy".as_ref(), "-d".as_ref(), image.dir.as_os_str()];
    arguments.extend(more);
    until("the numbers of the killed threads are free", || {
        let output = node.rekindle(&arguments)?;
        let log = fs::read_to_string(image.path("restore.log")).unwrap_or_default();
        let too_early = !output.status.success() && log.contains("Unable to create a thread: -17");
        Ok((!too_early).then_some(output))
    })
}

fn succeeded(output: &Output) -> Result {
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// A restored program that lacks pages of its memory, since the server is stopped.
struct Lacking {
    app: App,
    image: Image,
    until_file: PathBuf,
    server: i32,
    guard: i32,
}

/// Dumps and restores a program, and stops the server of its pages when CRIU is about to let the program run. It cannot be stopped
/// earlier: it ends if a signal interrupts its wait for the first page. It brings pages by then, and may have brought all, so programs
/// have more and more memory.
fn restored_without_pages(node: &Node) -> Result<Lacking> {
    for doublings in 0..6 {
        let (image, until_file) = dumped_with(node, &(BALLAST_KIB << doublings).to_string())?;
        for _ in 0..3 {
            if let Some((app, server, guard)) = try_without_pages(node, &image)? {
                return Ok(Lacking { app, image, until_file, server, guard });
            }
        }
        fs::remove_dir_all(&image.dir)?;
    }
    bail!("the server brings all pages before a program runs, however many these are")
}

/// Restores the program, stops the server, and returns the program, the server and its guard if the program lacks pages.
fn try_without_pages(node: &Node, image: &Image) -> Result<Option<(App, i32, i32)>> {
    let (script, pid) = (node.fresh("script"), node.fresh("pid"));
    let find = format!("pgrep -f 'lazy-pages --images-dir {}'", image.dir.display());
    let stop = format!("server=$({find}) && kill -STOP $server && echo $server >'{}'", pid.display());
    let text = format!("#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = pre-resume ] || exit 0\n{stop}\nexit 0\n");
    stage::write_script(&script, &text)?;
    succeeded(&restore(node, image, &["--".as_ref(), "--action-script".as_ref(), script.as_os_str()])?)?;
    let app = App::adopt(image.app.clone());
    let server = fs::read_to_string(&pid).ok().and_then(|it| it.trim().parse().ok());
    let is_good = |server: &i32| lacks_pages(app.pid()).unwrap_or(false) && !waits_for_the_first_page(*server);
    let Some(server) = server.filter(is_good) else {
        app.kill()?;
        return Ok(None);
    };
    let stat = fs::read_to_string(format!("/proc/{server}/stat"))?;
    let guard = stat.rsplit_once(") ").and_then(|(_, it)| it.split(' ').nth(1)?.parse().ok()).context("no guard")?;
    Ok(Some((app, server, guard)))
}

/// Whether a stopped server was stopped as it waited for the first page: it would end when it goes on. Later it does not wait, but looks.
fn waits_for_the_first_page(server: i32) -> bool {
    let syscall = fs::read_to_string(format!("/proc/{server}/syscall")).unwrap_or_default();
    let mut words = syscall.split(' ');
    words.next() == Some(&libc::SYS_epoll_wait.to_string())
        && words.nth(3).is_some_and(|timeout| timeout.ends_with("ffffffff"))
}

fn lacks_pages(pid: i32) -> Result<bool> {
    Ok(rekindle_wire::lazy_pages::lacks_pages(&fs::read_to_string(format!("/proc/{pid}/smaps"))?))
}

/// Nothing is left of the guard of a restore.
fn guard_is_gone(guard: i32) -> Result {
    until_true("the guard is gone", || Ok(process::is_gone(guard) || process::reap(guard).is_some()))?;
    ensure!(!Path::new(rekindle_wire::lazy_pages::FOLDER).join(guard.to_string()).exists());
    Ok(())
}

#[test]
fn a_program_goes_on_with_its_own_pages_while_they_are_brought() -> Result {
    let node = Node::start()?;
    let (image, until_file) = dumped(&node)?;
    for more in [&[][..], &["--wait-loaded".as_ref()]] {
        succeeded(&restore(&node, &image, more)?)?;
        let app = App::adopt(image.app.clone());
        ensure!(more.is_empty() || !lacks_pages(app.pid())?, "not all pages are there");
        app.advances()?;
        until_true("all pages are there", || Ok(!lacks_pages(app.pid())?))?;
        app.advances()?;
        app.kill()?;
        ensure!(image.path("lazy-pages.log").exists(), "no server was started");
    }
    succeeded(&restore(&node, &image, &[])?)?;
    let app = App::adopt(image.app.clone());
    fs::write(&until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

/// Its server has ended before CRIU's plugin can tell the guard of it.
#[test]
fn a_program_with_little_memory_has_all_pages_before_it_runs() -> Result {
    let node = Node::start()?;
    let (image, until_file) = dumped_with(&node, "4")?;
    for _ in 0..5 {
        succeeded(&restore(&node, &image, &["--wait-loaded".as_ref()])?)?;
        let app = App::adopt(image.app.clone());
        app.advances()?;
        app.kill()?;
    }
    succeeded(&restore(&node, &image, &[])?)?;
    fs::write(&until_file, "")?;
    assert_eq!(App::adopt(image.app.clone()).finish()?, "steady ok\n");
    nothing_serves(&node)?;
    node.finish()
}

#[test]
fn two_restores_at_once_have_a_server_each() -> Result {
    let node = Node::start()?;
    let (image, _) = dumped(&node)?;
    let Lacking { app, until_file, server, .. } = restored_without_pages(&node)?;
    succeeded(&restore(&node, &image, &["--wait-loaded".as_ref()])?)?;
    let other = App::adopt(image.app.clone());
    other.advances()?;
    ensure!(lacks_pages(app.pid())?);
    process::signal(server, libc::SIGCONT)?;
    fs::write(&until_file, "")?;
    for app in [app, other] {
        assert_eq!(app.finish()?, "steady ok\n");
    }
    node.finish()
}

#[test]
fn a_dump_waits_until_all_pages_are_there() -> Result {
    let node = Node::start()?;
    let Lacking { app, until_file, server, guard, .. } = restored_without_pages(&node)?;
    let (dump, again) = node.start_dump(&app, Fate::Killed)?;
    until_true("the dump waits", || {
        Ok(fs::read_to_string(node.path("daemon.log"))?.contains("the dump waits until CRIU has brought all pages"))
    })?;
    process::signal(server, libc::SIGCONT)?;
    let outcome = dump.wait()?;
    ensure!(outcome.status.success(), "{}", outcome.log);
    app.was_killed(&again.tree)?;
    guard_is_gone(guard)?;
    let app = node.restore(&again)?;
    fs::write(&until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

#[test]
fn a_dump_fails_where_the_pages_do_not_come() -> Result {
    let mut node = Node::start()?;
    let Lacking { app, until_file, server, guard, .. } = restored_without_pages(&node)?;
    let is_running = || Ok(node.client(app.pid()).is_ok_and(|it| it.state == "running"));
    until_true("its GPU memory is loaded", is_running)?;
    // The next daemon knows nothing of the restore.
    node.stop_daemon()?;
    node.configure("stall_timeout_ms = 500");
    node.start_daemon(&[])?;
    let is_running = || Ok(node.client(app.pid()).is_ok_and(|it| it.state == "running"));
    until_true("the next daemon has it", is_running)?;
    let (dump, _) = node.start_dump(&app, Fate::Running)?;
    let outcome = dump.wait()?;
    let said = format!("process {} still lacks pages of its memory after 500 ms (stall_timeout_ms)", app.pid());
    ensure!(!outcome.status.success() && outcome.log.contains(&said), "{}", outcome.log);
    process::signal(server, libc::SIGCONT)?;
    app.advances()?;
    guard_is_gone(guard)?;
    fs::write(&until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

#[test]
fn a_program_that_will_never_have_its_pages_is_killed_and_runs_no_step_without_them() -> Result {
    let node = Node::start()?;
    for signal in [libc::SIGKILL, libc::SIGABRT] {
        let Lacking { app, image, server, guard, .. } = restored_without_pages(&node)?;
        process::signal(server, signal)?;
        // It takes the signal before it goes on.
        let _ = process::signal(server, libc::SIGCONT);
        let identity = app.was_killed(&image.tree)?;
        guard_is_gone(guard)?;
        let said = fs::read_to_string(image.path("lazy-pages.log"))?;
        ensure!(said.contains("criu lazy-pages has not brought all pages"), "{said}");
        // A wrong page would have been reported.
        let errors = fs::read_to_string(&identity.err)?;
        ensure!(errors.is_empty(), "{errors}");
        // The image is as good as before.
        let app = node.restore(&image)?;
        app.advances()?;
        app.kill()?;
    }
    node.finish()
}

#[test]
fn a_server_goes_on_when_its_guard_is_killed() -> Result {
    let node = Node::start()?;
    let Lacking { app, until_file, server, guard, .. } = restored_without_pages(&node)?;
    process::signal(guard, libc::SIGKILL)?;
    until_true("the guard is gone", || Ok(process::is_gone(guard) || process::reap(guard).is_some()))?;
    process::signal(server, libc::SIGCONT)?;
    until_true("all pages are there", || Ok(!lacks_pages(app.pid())?))?;
    fs::write(&until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

#[test]
fn an_image_without_all_pages_is_refused() -> Result {
    let node = Node::start()?;
    let (image, _) = dumped(&node)?;
    let pages = image.path("pages-1.img");
    fs::File::options().write(true).open(&pages)?.set_len(fs::metadata(&pages)?.len() - 1)?;
    for lazy in [&["--lazy".as_ref()][..], &[]] {
        let arguments: Vec<&OsStr> =
            [OsStr::new("restore"), image.dir.as_os_str()].into_iter().chain(lazy.to_vec()).collect();
        let output = node.rekindle(&arguments)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(4) && said.contains("pages-1.img has"), "{said}");
    }
    nothing_serves(&node)?;
    node.finish()
}

#[test]
fn a_restore_that_fails_leaves_neither_processes_nor_a_server() -> Result {
    let node = Node::start()?;
    let (image, _) = dumped(&node)?;
    let damaged = image.copy(node.path("damaged"))?;
    let core = format!("core-{}.img", image.app.pid);
    fs::remove_file(damaged.path(&core))?;
    let output = restore(&node, &damaged, &[])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && said.contains("cannot restore the image in"), "{said}");
    nothing_serves(&node)?;
    node.finish()
}

/// Neither a server nor a guard of this node is left.
fn nothing_serves(node: &Node) -> Result {
    let variable = format!("REKINDLE_SOCKET={}", node.socket().display());
    until_true("no server is left", || {
        let serves = |pid: &i32| process::command_line(*pid).contains("lazy-pages");
        Ok(!process::with_environment(&variable).iter().any(serves))
    })
}
