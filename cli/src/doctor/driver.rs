//! The GPU's driver, as the daemon's workers have found it, or as far as it can be examined without them.

use std::fs;
use std::path::Path;

use rekindle_wire::control::StatusInfo;

use super::Finding;
use crate::output;

/// The driver whose functions Rekindle declares speaks this version of CUDA.
const DECLARED: i32 = 13000;

pub(super) fn look(status: Option<&StatusInfo>) -> Vec<Finding> {
    match status {
        Some(status) if !status.gpus.is_empty() => {
            let mut findings = vec![of_workers(status)];
            findings.extend(status.driver_version.map(without_rekindle));
            findings.extend(status.gpus.iter().map(|gpu| {
                Finding::ok("GPU", format!("{}, {}, {}", gpu.name, output::size(gpu.memory), gpu.pci_bus_id))
            }));
            findings
        }
        _ => vec![loaded(
            fs::read_to_string("/proc/driver/nvidia/version").ok().as_deref(),
            Path::new("/dev/nvidiactl").exists(),
        )],
    }
}

fn of_workers(status: &StatusInfo) -> Finding {
    let version = status.driver_version.unwrap_or(0);
    let found = format!("{}, CUDA {}.{}", status.cuda_driver, version / 1000, version % 1000 / 10);
    if status.cuda_driver.contains("simgpu") {
        return Finding::note(
            "driver",
            found,
            "this is the software GPU, for tests: start rekindled without --cuda-driver for a real one",
        );
    }
    match version {
        it if it < DECLARED => Finding::note(
            "driver",
            found,
            "programs made with CUDA 13.0 need driver 580 or later, as they do without Rekindle",
        ),
        it if it > DECLARED + 999 => Finding::note(
            "driver",
            found,
            "newer than what Rekindle declares: `rekindle doctor --api` lists what it does not know",
        ),
        _ => Finding::ok("driver", found),
    }
}

/// What becomes of processes that use the driver's own library.
fn without_rekindle(version: i32) -> Finding {
    const FIRST: i32 = rekindle_cuda_abi::checkpoint::FIRST;
    if version < FIRST {
        return Finding::note(
            "native",
            "processes that use a GPU without Rekindle cannot be dumped: the driver's own checkpoint needs CUDA 12.8 (driver 570)",
            "start them with `rekindle run`, or install driver 570 or later",
        );
    }
    Finding::ok(
        "native",
        "processes that use a GPU without Rekindle are dumped by the driver's own checkpoint: they stand still for all of their GPU memory, \
         which goes through host memory and CRIU; managed and exported memory are not supported (`rekindle check PID`)",
    )
}

/// Why no worker may have started, as far as this process can see.
fn loaded(version: Option<&str>, device: bool) -> Finding {
    let version = version.and_then(|text| text.lines().next()).map(|line| line.trim_start_matches("NVRM version: "));
    match (version, device) {
        (Some(version), true) => Finding::ok("driver", version),
        (Some(version), false) => Finding::bad(
            "driver",
            format!("{version}, but there is no /dev/nvidiactl"),
            "run nvidia-modprobe, or give this container the devices",
        ),
        (None, true) => Finding::bad(
            "driver",
            "/dev/nvidiactl, but the kernel's module does not say its version",
            "load the module: modprobe nvidia",
        ),
        (None, false) => Finding::bad(
            "driver",
            "no NVIDIA driver is loaded",
            "install driver 580 or later; or try Rekindle on the software GPU: rekindled --cuda-driver .../lib/rekindle/simgpu/libcuda.so.1",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn a_driver_before_570_has_no_checkpoint_of_its_own() {
        assert_eq!(without_rekindle(12_040).verdict, Verdict::Note);
        assert_eq!(without_rekindle(12_080).verdict, Verdict::Ok);
    }

    #[test]
    fn a_module_without_devices_is_no_driver() {
        assert_eq!(loaded(Some("NVRM version: NVIDIA 580.1\nGCC\n"), true), Finding::ok("driver", "NVIDIA 580.1"));
        for (version, device) in [(Some("NVIDIA 580.1"), false), (None, true), (None, false)] {
            assert_eq!(loaded(version, device).verdict, Verdict::Bad);
        }
    }
}
