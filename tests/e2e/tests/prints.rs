//! The output of kernels' prints and of failed assertions: where it appears, and how often.

use std::fs::File;
use std::process::{Command, Stdio};

use rekindle_e2e::app::{App, undisturbed};
use rekindle_e2e::{Node, Result, stage};

#[test]
fn a_failed_assertion_says_so_on_the_applications_stderr() -> Result {
    let node = Node::start()?;
    let app = node.run("asserts", &["--iterations", "3"])?;
    assert!(app.end()?.success());
    let said = app.errors()?;
    assert_eq!(
        said.matches("block: [0,0,0], thread: [1,0,0] Assertion `iteration != fails` failed.").count(),
        1,
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    node.finish()
}

#[test]
fn what_kernels_print_comes_out_once_in_an_original_and_in_what_is_restored_later() -> Result {
    let arguments = ["--iterations", "60", "--sleep-us", "10000"];
    let expected = undisturbed("printf", &arguments)?;
    let node = Node::start()?;
    let app = node.run("printf", &arguments)?;
    app.reaches(20)?;
    let image = node.dump(&app)?;
    image.must_be_of_the_middle(&expected)?;
    let identity = app.identity().clone();
    assert_eq!(app.finish()?, expected, "the original");
    // The restored program writes to the same file at its old offset: the part before it is a hole now.
    App::forget_output(&identity, 0)?;
    let rest = node.restore(&image)?.finish()?;
    let rest = rest.trim_start_matches('\0');
    assert!(rest.len() > 100 && rest.len() < expected.len() && expected.ends_with(rest), "the restored one: {rest}");
    node.finish()
}

#[test]
fn a_program_whose_stderr_takes_nothing_ends_as_it_would_without_its_lines() -> Result {
    let expected = undisturbed("launches", &[])?;
    let node = Node::start()?;
    // A table of times is written when the program ends, and failed calls are written before.
    for log in ["times", "errors"] {
        let (reader, gone) = std::io::pipe()?;
        drop(reader);
        let full = File::options().write(true).open("/dev/full")?;
        for stderr in [Stdio::from(full), Stdio::from(gone)] {
            must_print(node.command(&stage::app("launches")?)?.env("REKINDLE_LOG", log).stderr(stderr), &expected)?;
        }
    }
    node.finish()
}

#[test]
fn what_a_program_prints_to_an_output_that_it_has_closed_reaches_nobody() -> Result {
    let node = Node::start()?;
    for (number, closed) in ["2>&-", ">&-", ">&- 2>&-"].iter().enumerate() {
        let mut command = node.command("/bin/sh".as_ref())?;
        let progress = node.path(&format!("progress-{number}"));
        command.arg("-c").arg(format!("exec \"$0\" --progress \"$1\" {closed}")).arg(stage::app("launches")?);
        // The program reports each failed call on stderr, and its results on stdout.
        command.arg(&progress).env("REKINDLE_LOG", "errors").stdin(Stdio::null()).stdout(Stdio::null());
        let status = command.stderr(Stdio::null()).status()?;
        assert!(status.success(), "{closed}: {status:?}");
        assert_eq!(std::fs::read_to_string(&progress)?.trim(), "40", "{closed}");
    }
    node.is_idle()?;
    let log = std::fs::read_to_string(node.path("daemon.log"))?;
    assert!(!log.contains("the client's connection failed"), "{log}");
    node.finish()
}

fn must_print(command: &mut Command, expected: &str) -> Result {
    let output = command.stdout(Stdio::piped()).output()?;
    assert!(output.status.success(), "{:?} of {command:?}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    Ok(())
}
