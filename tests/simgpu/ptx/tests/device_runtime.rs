//! Functions of the device runtime: launches by kernels, conditions of graphs, and the refusal of all others by name.

#![allow(clippy::unwrap_used, reason = "only tests are here")]

mod common;

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use common::{BASE, Device, Params};
use rekindle_ptx::{Children, Conditions, Env, FaultKind, LaunchConfig, launch};

const HEAD: &str = ".version 9.0\n.target sm_90\n.address_size 64\n";

/// What kernels ask of the device, in order.
#[derive(Default)]
struct Asked(Mutex<Vec<String>>);

impl Asked {
    fn note(&self, what: String) {
        self.0.lock().unwrap().push(what);
    }
}

impl Children for Asked {
    fn parameters(&self, kernel: u64, grid: [u32; 3], block: [u32; 3], shared: u32) -> Option<u64> {
        self.note(format!("kernel {kernel:#x} {grid:?} {block:?} {shared}"));
        (grid != [9, 9, 9]).then_some(BASE)
    }

    fn launch(&self, parameters: u64, stream: u64) -> u32 {
        self.note(format!("launch {} {stream}", parameters - BASE));
        0
    }

    fn last_error(&self, take: bool) -> u32 {
        self.note(format!("error {take}"));
        7
    }

    fn create_stream(&self) -> u64 {
        0x55
    }
}

impl Conditions for Asked {
    fn set(&self, handle: u64, value: u32) -> bool {
        self.note(format!("condition {handle} {value}"));
        handle == 1
    }
}

const LAUNCHING: &str = "
.extern .func (.param .b64 r) __cudaCDP2GetParameterBufferV2(.param .b64 a, .param .align 4 .b8 b[12], .param .align 4 .b8 c[12],
    .param .b32 d);
.extern .func (.param .b32 r) __cudaCDP2LaunchDeviceV2(.param .b64 a, .param .b64 b);
.extern .func (.param .b32 r) __cudaCDP2GetLastError();
.visible .entry child(.param .u32 n) { ret; }
.visible .entry parent(.param .u64 out) {
    .reg .b64 %rd<4>; .reg .b32 %r<3>;
    ld.param.u64 %rd0, [out];
    mov.u64 %rd1, child;
    { .param .b64 p0; .param .align 4 .b8 p1[12]; .param .align 4 .b8 p2[12]; .param .b32 p3; .param .b64 r;
      st.param.b64 [p0], %rd1;
      st.param.b32 [p1], 1; st.param.b32 [p1+4], 2; st.param.b32 [p1+8], 3;
      st.param.b32 [p2], 4; st.param.b32 [p2+4], 5; st.param.b32 [p2+8], 6;
      st.param.b32 [p3], 64;
      call.uni (r), __cudaCDP2GetParameterBufferV2, (p0, p1, p2, p3);
      ld.param.b64 %rd2, [r]; }
    st.u32 [%rd2], 11;
    { .param .b64 p0; .param .b64 p1; .param .b32 r;
      st.param.b64 [p0], %rd2; st.param.b64 [p1], 3;
      call.uni (r), __cudaCDP2LaunchDeviceV2, (p0, p1);
      ld.param.b32 %r0, [r]; }
    { .param .b32 r; call.uni (r), __cudaCDP2GetLastError, (); ld.param.b32 %r1, [r]; }
    st.global.u32 [%rd0], %r1;
    ret;
}";

#[test]
fn a_kernel_launches_another_with_the_parameters_that_it_writes() {
    let mut device = Device::with_text(&format!("{HEAD}{LAUNCHING}"));
    let parameters = device.alloc(4);
    let out = device.alloc(4);
    assert_eq!(parameters, BASE);
    let (cancel, asked) = (AtomicBool::new(false), Asked::default());
    let env = Env { children: Some(&asked), ..Env::new(&cancel) };
    let params = Params::new().with(out);
    let config = LaunchConfig::new([1; 3], [1; 3], params.bytes());
    launch(&device.program, "parent", &config, &device, &env).unwrap();
    let child = device.program.address("child").unwrap();
    let expected = [format!("kernel {child:#x} [1, 2, 3] [4, 5, 6] 64"), "launch 0 3".into(), "error true".into()];
    assert_eq!(*asked.0.lock().unwrap(), expected);
    assert_eq!((device.read::<u32>(parameters, 1), device.read::<u32>(out, 1)), (vec![11], vec![7]));
    assert_eq!(device.program.kernel_at(child).unwrap().name, "child");
    assert!(device.program.kernel_at(child + 1).is_none());
    // A device that executes no such launches says so; it does not ignore them.
    let fault = device.try_run("parent", &config).unwrap_err();
    assert!(
        matches!(&fault.fault.kind, FaultKind::Unsupported(it) if it.what.contains("a launch by a kernel")),
        "{fault}"
    );
}

#[test]
fn a_condition_that_the_graph_does_not_have_is_an_access_to_no_memory() {
    let device = Device::with_text(&format!(
        "{HEAD}.extern .func cudaGraphSetConditional(.param .b64 a, .param .b32 b);
        .visible .entry k(.param .u64 handle) {{
            .reg .b64 %rd<1>; ld.param.u64 %rd0, [handle];
            {{ .param .b64 p0; .param .b32 p1; st.param.b64 [p0], %rd0; st.param.b32 [p1], 5;
               call.uni cudaGraphSetConditional, (p0, p1); }}
            ret; }}"
    ));
    let (cancel, asked) = (AtomicBool::new(false), Asked::default());
    let run = |handle: u64, conditions| {
        let env = Env { conditions, ..Env::new(&cancel) };
        let params = Params::new().with(handle);
        let config = LaunchConfig::new([1; 3], [1; 3], params.bytes());
        launch(&device.program, "k", &config, &device, &env).map_err(|it| it.fault.kind)
    };
    assert_eq!(run(1, Some(&asked)), Ok(()));
    assert_eq!(run(2, Some(&asked)), Err(FaultKind::Unmapped));
    assert_eq!(run(1, None), Err(FaultKind::Unmapped));
    assert_eq!(*asked.0.lock().unwrap(), ["condition 1 5", "condition 2 5"]);
}

#[test]
fn a_function_of_the_device_runtime_that_is_not_provided_is_refused_by_its_name() {
    let device = Device::with_text(&format!(
        "{HEAD}.extern .func (.param .b32 r) __cudaCDP2GraphLaunch(.param .b64 a);
        .visible .entry k() {{ {{ .param .b64 p0; .param .b32 r; st.param.b64 [p0], 0;
            call.uni (r), __cudaCDP2GraphLaunch, (p0); }} ret; }}"
    ));
    let refused = device.program.supported("k").unwrap_err();
    assert!(refused.what.contains("__cudaCDP2GraphLaunch"), "{refused}");
}
