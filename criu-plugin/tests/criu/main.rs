//! The plugin in real CRIU, with a daemon and applications of the tests: both sides observe the effect of each hook. Needs
//! root, and CRIU as `scripts/setup` provides it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod application;
mod cases;
mod daemon;
mod stage;

/// Defines each case for both CRIUs.
macro_rules! cases {
    ($($case:ident)*) => {
        mod criu_4_1 {
            $(#[test] fn $case() {
                crate::stage::run("4.1", concat!("criu_4_1::", stringify!($case)), crate::cases::$case);
            })*
        }
        mod criu_4_2 {
            $(#[test] fn $case() {
                crate::stage::run("4.2", concat!("criu_4_2::", stringify!($case)), crate::cases::$case);
            })*
        }
    };
}

cases! {
    a_killed_process_is_restored
    a_tree_is_restored_again_and_again
    a_connection_that_a_forked_child_holds_too_is_restored_once
    a_running_process_goes_on_before_its_image_is_durable
    a_failed_image_leaves_a_running_process_running
    a_failed_image_keeps_a_process_from_being_killed
    a_failed_image_leaves_connections_unlocked
    a_dump_that_criu_fails_closes_the_session
    a_killed_criu_closes_the_session
    what_cannot_be_quiesced_is_not_dumped
    a_long_quiesce_outlasts_the_alarm
    without_a_daemon_a_client_is_not_dumped
    foreign_processes_are_dumped_with_and_without_a_daemon
    a_daemon_that_hangs_or_refuses_holds_up_no_foreign_dump
    a_pre_dump_pauses_nothing
    a_restore_that_cannot_be_prepared_runs_nothing
    without_a_daemon_nothing_is_restored
    an_image_without_its_gpu_part_is_not_restored
    a_criu_without_the_plugin_does_not_restore
    a_stale_gpu_part_does_not_hinder_a_foreign_restore
    a_process_that_cannot_go_on_takes_the_tree_with_it
    a_container_is_checkpointed_while_it_runs_and_restored
    a_container_whose_image_fails_runs_on
    a_daemon_that_forgets_a_process_fails_the_restore
}

/// Not a test: the process that the tests dump. See [`application::run`].
#[test]
#[ignore = "run by the tests"]
fn application() {
    application::run();
}
