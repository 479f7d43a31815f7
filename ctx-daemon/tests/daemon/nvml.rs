//! NVML's queries, with the machine's NVML and without one.

use std::path::{Path, PathBuf};
use std::process::Command;

use rekindle_wire::control::{Reply, Request};
use rekindle_wire::nvml::{Answer, Argument, Gpus, Memory, Question};
use tempfile::TempDir;

use crate::support::{Client, Daemon, as_user, ask, eventually, reason};

const NOT_SUPPORTED: u32 = 3;

/// A daemon on a machine that has a `libnvidia-ml.so.1`.
fn with_nvml() -> Daemon {
    with_nvml_and(&[])
}

fn with_nvml_and(files: &[(&str, &str)]) -> Daemon {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let include = std::env::var_os("REKINDLE_CUDA_INCLUDE")
        .map_or_else(|| here.join("../.toolchain/cuda/include"), PathBuf::from);
    let dir = TempDir::new().unwrap();
    let compiled = Command::new("gcc")
        .args(["-shared", "-fPIC", "-Wall", "-DNVML_NO_UNVERSIONED_FUNC_DEFS", "-I"])
        .arg(include)
        .arg(here.join("tests/daemon/nvml.c"))
        .arg("-o")
        .arg(dir.path().join("libnvidia-ml.so.1"))
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Daemon::start_in(dir, files)
}

fn gpus(daemon: &Daemon) -> Gpus {
    match ask(&daemon.socket(), &Request::Gpus, &[]) {
        Reply::Gpus(gpus) => gpus,
        other => panic!("{other:?}"),
    }
}

fn asked(daemon: &Daemon, function: &str, arguments: &[Argument]) -> Reply {
    let question = Question { function: function.to_owned(), arguments: arguments.to_vec() };
    ask(&daemon.socket(), &Request::GpuAsk(question), &[])
}

fn answer(daemon: &Daemon, function: &str, arguments: &[Argument]) -> Answer {
    match asked(daemon, function, arguments) {
        Reply::GpuAnswer(answer) => answer,
        other => panic!("{other:?}"),
    }
}

fn room(size: usize) -> Argument {
    Argument::Buffer(vec![0; size])
}

const GPU: Argument = Argument::Device(0);

#[test]
fn without_nvml_there_is_what_the_cuda_driver_says() {
    let daemon = Daemon::start();
    let gpus = gpus(&daemon);
    assert_eq!((gpus.driver_version, gpus.cuda_driver_version), (None, 13000));
    let [gpu] = gpus.gpus.as_slice() else { panic!("{:?}", gpus.gpus) };
    assert_eq!((gpu.name.as_str(), gpu.uuid, gpu.minor), ("Fake", [1; 16], None));
    let memory = Memory { total: 1 << 30, free: 1 << 29, reserved: 0 };
    assert_eq!(ask(&daemon.socket(), &Request::GpuMemory { gpu: 0 }, &[]), Reply::GpuMemory(memory));
    assert!(reason(ask(&daemon.socket(), &Request::GpuMemory { gpu: 1 }, &[])).contains("no GPU 1"));
    assert_eq!(answer(&daemon, "nvmlDeviceGetPowerUsage", &[GPU, room(4)]).result, NOT_SUPPORTED);
    // The peer holds no place, and takes no worker.
    assert_eq!(daemon.status().used, 0);
}

#[test]
fn the_machines_nvml_answers_the_rest_as_nobody() {
    let daemon = with_nvml();
    let gpus = gpus(&daemon);
    assert_eq!(gpus.driver_version.as_deref(), Some("580.1"));
    assert_eq!((gpus.nvml_version, gpus.gpus[0].minor), (None, Some(7)));
    let memory = Memory { total: 1000, free: 600, reserved: 100 };
    assert_eq!(ask(&daemon.socket(), &Request::GpuMemory { gpu: 0 }, &[]), Reply::GpuMemory(memory));
    let power = answer(&daemon, "nvmlDeviceGetPowerUsage", &[GPU, room(4)]);
    assert_eq!(power, Answer { result: 0, buffers: vec![123_456_u32.to_le_bytes().to_vec()] });
    let text = answer(&daemon, "nvmlDeviceGetVbiosVersion", &[GPU, room(32), Argument::Number(32)]);
    assert!(text.buffers[0].starts_with(b"96.00\0"), "{text:?}");
    let mut values = vec![0; 80];
    values[40] = 9;
    let fields = [GPU, Argument::Number(2), Argument::Buffer(values)];
    let fields = answer(&daemon, "nvmlDeviceGetFieldValues", &fields);
    assert_eq!((fields.buffers[0][32], fields.buffers[0][72]), (1, 10));
    // A function that this library does not have.
    assert_eq!(answer(&daemon, "nvmlDeviceGetFanSpeed", &[GPU, room(4)]).result, 13);
}

#[test]
fn about_a_virtual_gpu_nvml_is_asked_for_what_is_the_gpus() {
    let daemon = with_nvml_and(&[("parts", "2"), ("memory", "500")]);
    let gpus = gpus(&daemon);
    let told: Vec<_> = gpus.gpus.iter().map(|it| (it.uuid, it.memory, it.minor)).collect();
    assert_eq!(told, [([2; 16], 500, Some(7)), ([3; 16], 500, Some(7))]);
    for gpu in 0..2 {
        let power = answer(&daemon, "nvmlDeviceGetPowerUsage", &[Argument::Device(gpu), room(4)]);
        assert_eq!(power, Answer { result: 0, buffers: vec![123_456_u32.to_le_bytes().to_vec()] });
    }
    let memory = |gpu| match ask(&daemon.socket(), &Request::GpuMemory { gpu }, &[]) {
        Reply::GpuMemory(memory) => memory,
        other => panic!("{other:?}"),
    };
    let whole = Memory { total: 500, free: 500, reserved: 0 };
    assert_eq!((memory(0), memory(1)), (whole, whole));
    // The client has more than that on the first one.
    let client = Client::attached(&daemon, "app");
    eventually("the daemon counts the client's memory", || (memory(0).free == 0).then_some(()));
    assert_eq!(memory(1), whole);
    drop(client);
    // The library does not have this function; between two parts of one GPU it is not asked.
    let between = [GPU, Argument::Device(1), Argument::Number(0), room(4)];
    assert_eq!(answer(&daemon, "nvmlDeviceGetP2PStatus", &between), Answer { result: 0, buffers: vec![vec![0; 4]] });
}

#[test]
fn what_is_not_of_the_table_never_reaches_the_library() {
    let daemon = with_nvml();
    for (function, arguments) in [
        ("nvmlDeviceSetPowerManagementLimit", vec![GPU, Argument::Number(1)]),
        ("nvmlInit_v2", vec![]),
        ("system", vec![room(4)]),
        ("nvmlDeviceGetPowerUsage", vec![Argument::Device(1), room(4)]),
        ("nvmlDeviceGetPowerUsage", vec![Argument::Number(0), room(4)]),
        ("nvmlDeviceGetPowerUsage", vec![GPU, room(3)]),
        ("nvmlDeviceGetVbiosVersion", vec![GPU, room(32), Argument::Number(33)]),
        ("nvmlDeviceGetFieldValues", vec![GPU, Argument::Number(u64::MAX), room(40)]),
    ] {
        assert!(!reason(asked(&daemon, function, &arguments)).is_empty(), "{function}");
    }
}

#[test]
fn a_helper_that_ends_costs_its_question_and_no_more() {
    let daemon = with_nvml();
    assert!(gpus(&daemon).driver_version.is_some());
    let serial = answer(&daemon, "nvmlDeviceGetSerial", &[GPU, room(30), Argument::Number(30)]);
    assert_eq!(serial.result, NOT_SUPPORTED);
    assert!(gpus(&daemon).driver_version.is_some());
    let client = Client::attached(&daemon, "app");
    assert!(daemon.state_of(client.pid).is_some());
}

fn processes(reply: &Reply) -> Vec<i32> {
    let Reply::GpuProcesses(processes) = reply else { panic!("{reply:?}") };
    let mut pids: Vec<_> = processes.iter().map(|it| it.pid as i32).collect();
    pids.sort_unstable();
    pids
}

#[test]
fn who_computes_is_asked_of_all_workers_at_once() {
    let daemon = Daemon::start_with(&[("meeting", "1")]);
    let clients = ["meets-1", "meets-2", "meets-3"].map(|name| Client::attached(&daemon, name));
    let mut pids = clients.each_ref().map(|it| it.pid);
    pids.sort_unstable();
    let ask = || processes(&ask(&daemon.socket(), &Request::GpuProcesses { gpu: 0 }, &[]));
    // The daemon may learn of a client a moment after the client is attached.
    eventually("the daemon knows of all", || (ask() == pids).then_some(()));
    // From now on each worker answers only when all have been asked: one after the other, all would be out of time.
    std::fs::remove_file(daemon.dir.path().join("events")).unwrap();
    std::fs::write(daemon.dir.path().join("meeting"), "3").unwrap();
    eventually("all are described", || (ask() == pids).then_some(()));
    // A worker that does not answer delays no other answer, and its last description counts.
    let worker = daemon.clients()[0].worker;
    // SAFETY: a process that this test has caused to be.
    assert_eq!(unsafe { libc::kill(worker, libc::SIGSTOP) }, 0);
    assert_eq!(ask(), pids);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::kill(worker, libc::SIGCONT) }, 0);
}

#[test]
fn workers_of_others_are_not_asked_who_computes() {
    let daemon = Daemon::start_with(&[("config.toml", "socket_mode = \"0666\"\n"), ("meeting", "2")]);
    std::fs::set_permissions(daemon.dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o711)).unwrap();
    // Neither would answer, since the other worker does not exist.
    let _client = Client::attached(&daemon, "meets-1");
    let question = Request::GpuProcesses { gpu: 0 };
    let Some(reply) = as_user(65534, || ask(&daemon.socket(), &question, &[])) else {
        return eprintln!("skipped: not root");
    };
    assert_eq!(processes(&reply), [] as [i32; 0]);
    assert_eq!(daemon.events().iter().filter(|it| it.ends_with("Describe")).count(), 0);
}
