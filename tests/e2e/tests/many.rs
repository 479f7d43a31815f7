//! Many clients at once, the limits on clients, and the cost of idle clients.

use std::fs;
use std::time::{Duration, Instant};

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Node, Result};

#[test]
fn thirty_two_programs_that_start_at_once_all_end_as_they_should() -> Result {
    let arguments = ["--iterations", "10"];
    let expected = undisturbed("globals", &arguments)?;
    let node = Node::start()?;
    let apps = (0..32).map(|_| node.run("globals", &arguments)).collect::<Result<Vec<_>>>()?;
    for app in apps {
        assert_eq!(app.finish()?, expected);
    }
    node.finish()
}

#[test]
fn one_of_several_programs_on_a_gpu_is_dumped_and_restored_while_the_others_go_on() -> Result {
    let arguments = ["--iterations", "150", "--sleep-us", "5000"];
    let expected = undisturbed("streams4", &arguments)?;
    let node = Node::start()?;
    let others = (0..3).map(|_| node.run("streams4", &arguments)).collect::<Result<Vec<_>>>()?;
    let app = node.run("streams4", &arguments)?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    for other in others {
        assert_eq!(other.finish()?, expected);
    }
    node.finish()
}

#[test]
fn a_client_too_many_is_told_so_and_finds_room_later() -> Result {
    let node = Node::configured("[pool]\nmax = 2\n", &[])?;
    let waiting = |_| node.run("idle", &["--until", &node.path("end").display().to_string()]);
    let apps = (0..2).map(waiting).collect::<Result<Vec<_>>>()?;
    apps.iter().try_for_each(|app| app.reaches(1))?;
    let third = node.run("idle", &[])?;
    assert_eq!(third.end()?.code(), Some(3));
    let errors = third.errors()?;
    assert!(errors.contains("2 processes use the GPUs already") && errors.contains("pool.max"), "{errors}");
    fs::write(node.path("end"), "")?;
    for app in apps {
        app.finish()?;
    }
    node.is_idle()?;
    node.run("idle", &[])?.finish()?;
    node.finish()
}

#[test]
fn a_client_gets_no_more_memory_of_any_kind_than_the_configuration_lets_it_have() -> Result {
    let mut node = Node::configured("[limits]\ngpu_memory_mib = 64\npinned_memory_mib = 10\n", &[])?;
    let until = node.path("until").display().to_string();
    let app = node.run("budget", &["--until", &until])?;
    app.reaches(1)?;
    // The restored program has the memory that it had, and may allocate the rest up to the limit.
    let image = node.dump_and_kill(app)?;
    let app = node.restore(&image)?;
    fs::write(&until, "")?;
    let kinds = "plain 64\nfree 0 of 64\npool 64\narrays 64\nmipmaps 48\npieces 64\nimported 64\npinned 10\n";
    assert_eq!(app.finish()?, format!("free 64 of 64\n{kinds}more 48\nfree 0 of 64\n"));

    // With a lower limit the restored program keeps the memory that it had, of each kind, and gets no more.
    node.stop_daemon()?;
    node.configure("[limits]\ngpu_memory_mib = 15\n");
    node.start_daemon(&[])?;
    assert_eq!(node.restore(&image)?.finish()?, format!("free 64 of 64\n{kinds}more 0\nfree 0 of 15\n"));
    node.finish()
}

/// The cost of a process: CPU time, including threads that have ended, and how often its threads went to sleep.
fn cost(pid: i32) -> Result<(Duration, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    // utime and stime, in hundredths of a second.
    let ticks: u64 = fields.split(' ').skip(11).take(2).filter_map(|it| it.parse::<u64>().ok()).sum();
    let mut sleeps = 0;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that has ended since is not counted.
        let status = fs::read_to_string(thread?.path().join("status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        sleeps += line.and_then(|it| it.trim().parse::<u64>().ok()).unwrap_or(0);
    }
    Ok((Duration::from_millis(10 * ticks), sleeps))
}

/// The test measures CPU time, not elapsed time: a busy machine does not change it.
#[test]
fn a_worker_whose_client_does_nothing_costs_less_than_a_hundredth_of_a_core() -> Result {
    let node = Node::start()?;
    let app: App = node.run("idle", &["--until", &node.path("end").display().to_string()])?;
    app.reaches(1)?;
    let worker = node.client(app.pid())?.worker;
    node.wait_for_spare()?;
    for (name, pid) in [("worker", worker), ("daemon", node.daemon_pid()?)] {
        let (begin, start) = (cost(pid)?, Instant::now());
        std::thread::sleep(Duration::from_secs(4));
        let (end, elapsed) = (cost(pid)?, start.elapsed());
        let (time, sleeps) = (end.0.saturating_sub(begin.0), end.1.saturating_sub(begin.1));
        println!("idle {name}: {time:?} on a core and {sleeps} wake-ups in {elapsed:?}");
        assert!(time * 100 < elapsed, "an idle {name} took {time:?} of {elapsed:?}");
        assert!(sleeps < 10 * elapsed.as_secs(), "an idle {name} woke up {sleeps} times in {elapsed:?}");
    }
    // The measurement detects a process that is not idle: this loop runs until it has used CPU time.
    until_true("time is counted", || Ok(cost(std::process::id() as i32)?.0 > Duration::ZERO))?;
    fs::write(node.path("end"), "")?;
    app.finish()?;
    node.finish()
}
