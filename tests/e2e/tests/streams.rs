//! Work that waits in software: host callbacks and the commands behind them, and full streams. A dump finds this work
//! waiting, and the restored program goes on with it.

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::kill::goes_on_after_a_kill;
use rekindle_e2e::{Node, Result};

#[test]
fn host_callbacks_and_what_follows_them_are_as_on_the_driver_alone() -> Result {
    let expected = undisturbed("callbacks", &[])?;
    let node = Node::start()?;
    assert_eq!(node.run("callbacks", &[])?.finish()?, expected);
    node.finish()
}

#[test]
fn a_killed_program_goes_on_with_the_callbacks_that_were_held() -> Result {
    // The program is nearly always in a callback, with commands of several streams behind it.
    goes_on_after_a_kill("callbacks", &["--iterations", "40", "--callback-us", "60000"], 12)
}

#[test]
fn a_killed_program_goes_on_with_launches_far_ahead_of_the_device() -> Result {
    let arguments = ["--launches", "2500", "--spin", "2000", "--rounds", "60", "--bursts", "1", "--sleep-us", "5000"];
    goes_on_after_a_kill("ahead", &arguments, 10)
}

/// More copies than the staging memory has room for.
const HELD_COPIES: [&str; 4] = ["--copies", "64", "--strict", "1"];

#[test]
fn copies_that_wait_for_a_callback_do_not_make_their_caller_wait() -> Result {
    let expected = undisturbed("heldcopies", &HELD_COPIES)?;
    let node = Node::start()?;
    assert_eq!(node.run("heldcopies", &HELD_COPIES)?.finish()?, expected);
    node.finish()
}

#[test]
fn a_killed_program_goes_on_with_the_copies_that_were_held() -> Result {
    goes_on_after_a_kill("heldcopies", &["--iterations", "30", "--callback-us", "60000"], 8)
}

#[test]
fn launches_that_fill_hardware_queues_do_not_hold_up_the_write_that_they_wait_for() -> Result {
    let arguments = ["--launches", "300", "--rounds", "1", "--strict", "1"];
    let expected = undisturbed("queues", &arguments[..4])?;
    for connections in ["1", "8", "32"] {
        let node = Node::with_gpu(&[("CUDA_DEVICE_MAX_CONNECTIONS", connections)])?;
        assert_eq!(node.run("queues", &arguments)?.finish()?, expected, "{connections} queues");
        node.finish()?;
    }
    Ok(())
}

#[test]
fn attributes_are_set_while_launches_wait_for_a_callback_that_waits_for_who_sets_them() -> Result {
    let expected = undisturbed("settings", &[])?;
    let node = Node::start()?;
    assert_eq!(node.run("settings", &["--strict", "1"])?.finish()?, expected);
    node.finish()
}
