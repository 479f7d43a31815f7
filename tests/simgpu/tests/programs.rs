//! CUDA programs made by nvcc, with the real runtime, on the software GPU.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::time::{Duration, Instant};

use support::{driver_program, output, program, program_for, program_with};

#[test]
fn a_vector_addition_runs() {
    assert_eq!(output(&mut program("vectoradd")), "ok\n");
}

#[test]
fn devices_are_as_the_environment_says() {
    let two = "Rekindle software GPU 9.0 4294967296";
    let said = output(&mut program("devices"));
    assert_eq!(said, format!("{two} 0000:10:00.0\n{two} 0000:11:00.0\n"));
    let mut command = program("devices");
    command.envs([("SIMGPU_DEVICES", "1"), ("SIMGPU_MEMORY", "64M"), ("SIMGPU_CC", "8.6")]);
    assert_eq!(output(&mut command), "Rekindle software GPU 8.6 67108864 0000:10:00.0\n");
}

#[test]
fn code_for_a_newer_device_is_refused() {
    let run = program("vectoradd").env("SIMGPU_CC", "7.0").output().unwrap();
    assert!(String::from_utf8_lossy(&run.stderr).contains("is 209, not 0"), "{run:?}");
}

#[test]
fn machine_code_alone_is_refused() {
    let mut command = program_for("vectoradd", "arch=compute_90,code=sm_90");
    let run = command.output().unwrap();
    assert!(String::from_utf8_lossy(&run.stderr).contains("is 209, not 0"), "{run:?}");
}

#[test]
fn threads_do_not_disturb_each_other() {
    assert!(output(&mut driver_program("stress")).ends_with("ok\n"));
}

#[test]
fn addresses_are_the_same_in_every_process() {
    let first = output(&mut program("addresses"));
    assert_eq!(first, output(&mut program("addresses")));
}

#[test]
fn code_lies_where_its_first_use_finds_room() {
    assert_eq!(output(&mut driver_program("placement")), "ok\n");
}

#[test]
fn a_grid_meets_at_its_barriers() {
    assert_eq!(output(&mut program("grid")), "ok\n");
}

#[test]
fn streams_are_ordered_as_by_the_driver() {
    assert_eq!(output(&mut driver_program("streams")), "ok\n");
}

#[test]
fn a_short_queue_only_makes_programs_wait() {
    // This works if the kernel that holds a stream does not depend on commands that are submitted behind it.
    let mut command = program("vectoradd");
    assert_eq!(output(command.env("SIMGPU_QUEUE_DEPTH", "1")), "ok\n");
}

#[test]
fn memory_of_every_kind_works() {
    let said = output(&mut program("memory"));
    assert_eq!(said, "before\nkernel 7 of a block\nkernel 8 of a block\nafter\nok\n");
}

#[test]
fn per_thread_default_streams_work() {
    let options = ["--default-stream", "per-thread"];
    assert_eq!(output(&mut program_with("vectoradd", &options)), "ok\n");
    assert!(output(&mut program_with("memory", &options)).ends_with("ok\n"));
}

#[test]
fn virtual_memory_is_mapped_and_faults() {
    assert_eq!(output(&mut driver_program("vmm")), "ok\n");
    for fault in ["unmapped", "reserved", "readonly"] {
        assert_eq!(output(driver_program("vmm").arg(fault)), "700\n", "{fault}");
    }
}

#[test]
fn processes_exit_fork_and_reset() {
    for what in ["exit", "fork", "reset"] {
        let begun = Instant::now();
        assert_eq!(output(driver_program("life").arg(what)), "ok\n", "{what}");
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
    }
}

#[test]
fn faults_are_injected_where_they_are_asked_for() {
    let fails = |fault: &str, message: &str| {
        let run = program("vectoradd").env("SIMGPU_FAULT", fault).output().unwrap();
        let text = String::from_utf8_lossy(&run.stderr);
        assert!(!run.status.success() && text.contains(message), "{fault}: {text}");
    };
    fails("alloc:2:2", "cudaMalloc(&db, n * 4) is 2, not 0");
    fails("kernel:1:719", "cudaMemcpyDeviceToHost) is 719, not 0");
    fails("cuLaunchKernel:1:701", "cudaGetLastError() is 701, not 0");
    fails("cuMemFree_v2:1:exit=9", "injected at cuMemFree_v2 number 1");
    fails("cuMemFree_v2:1:kill", "injected at cuMemFree_v2 number 1");
    fails("nonsense", "not understood: nonsense");
}

#[test]
fn copies_are_as_fast_as_asked_for() {
    // 1.2 MB over a link of 4 MB a second, in both directions.
    let begun = Instant::now();
    assert_eq!(output(program("vectoradd").env("SIMGPU_COPY_GBPS", "0.004")), "ok\n");
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(280), "{took:?}");
}
