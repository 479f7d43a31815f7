//! The layer above a driver that has two GPUs of 10,000 bytes, which are no peers, and notes what it is asked to do.

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_void};

use super::*;

thread_local! {
    static CALLS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static CURRENT: Cell<CUcontext> = const { Cell::new(0) };
    static NEXT: Cell<CUcontext> = const { Cell::new(1000) };
}

fn note(call: String) -> CUresult {
    CALLS.with_borrow_mut(|calls| calls.push(call));
    CUDA_SUCCESS
}

/// What the driver has been asked to do since the last time.
fn calls() -> Vec<String> {
    CALLS.take()
}

/// Writes an out parameter of the layer's.
fn put<T>(out: *mut T, value: T) -> CUresult {
    // SAFETY: the layer passes pointers to its locals.
    unsafe { out.write(value) };
    CUDA_SUCCESS
}

unsafe extern "C" fn nothing() -> CUresult {
    CUDA_SUCCESS
}

unsafe extern "C" fn count(count: *mut i32) -> CUresult {
    put(count, 2)
}

unsafe extern "C" fn device(device: *mut CUdevice, ordinal: i32) -> CUresult {
    put(device, ordinal)
}

unsafe extern "C" fn uuid(uuid: *mut Uuid, device: CUdevice) -> CUresult {
    put(uuid, [device as u8; 16])
}

unsafe extern "C" fn total(bytes: *mut usize, _: CUdevice) -> CUresult {
    put(bytes, 10_000)
}

unsafe extern "C" fn pci(id: *mut c_char, _: i32, device: CUdevice) -> CUresult {
    for (at, byte) in format!("0000:0{device}:00.0\0").bytes().enumerate() {
        put(id.wrapping_add(at), byte.cast_signed());
    }
    CUDA_SUCCESS
}

unsafe extern "C" fn attribute(value: *mut i32, attribute: u32, device: CUdevice) -> CUresult {
    put(value, if attribute == PCI_DOMAIN_ID { 0 } else { device + 1 })
}

unsafe extern "C" fn can_access(can: *mut i32, _: CUdevice, _: CUdevice) -> CUresult {
    put(can, 0)
}

unsafe extern "C" fn link(
    capability: *mut u32,
    operation: *const u32,
    count: u32,
    from: CUdevice,
    to: CUdevice,
) -> CUresult {
    // SAFETY: the layer asks about one operation.
    put(capability, unsafe { operation.read() } * 1000 + count * 100 + from as u32 * 10 + to as u32)
}

unsafe extern "C" fn memory(free: *mut usize, total: *mut usize) -> CUresult {
    put(free, 7000);
    put(total, 10_000)
}

unsafe extern "C" fn retain(context: *mut CUcontext, device: CUdevice) -> CUresult {
    put(context, 100 + device as CUcontext)
}

unsafe extern "C" fn reset(device: CUdevice) -> CUresult {
    note(format!("reset {device}"))
}

unsafe extern "C" fn create(context: *mut CUcontext, flags: u32, device: CUdevice) -> CUresult {
    put(context, NEXT.replace(NEXT.get() + 1));
    note(format!("create on {device} with {flags}"))
}

unsafe extern "C" fn destroy(context: CUcontext) -> CUresult {
    note(format!("destroy {context}"))
}

unsafe extern "C" fn pop(context: *mut CUcontext) -> CUresult {
    put(context, 0);
    note("pop".to_owned())
}

unsafe extern "C" fn current(context: *mut CUcontext) -> CUresult {
    put(context, CURRENT.get())
}

unsafe extern "C" fn set_current(context: CUcontext) -> CUresult {
    CURRENT.set(context);
    CUDA_SUCCESS
}

unsafe extern "C" fn set_flags(flags: u32) -> CUresult {
    note(format!("flags {flags} of {}", CURRENT.get()))
}

unsafe extern "C" fn enable(peer: CUcontext, flags: u32) -> CUresult {
    note(format!("enable {peer} with {flags}"))
}

unsafe extern "C" fn disable(peer: CUcontext) -> CUresult {
    note(format!("disable {peer}"))
}

unsafe extern "C" fn set_access(at: u64, size: usize, access: *const CUmemAccessDesc, count: usize) -> CUresult {
    // SAFETY: the layer passes so many.
    let access = unsafe { std::slice::from_raw_parts(access, count) };
    let access: Vec<_> = access.iter().map(|it| (it.location_type, it.location_id, it.flags)).collect();
    note(format!("{at}, {size}: {access:?}"))
}

fn driver() -> Driver {
    let find = |symbol: &'static str| {
        Ok(match symbol.trim_end_matches('\0') {
            "cuDeviceGetCount" => count as *const c_void,
            "cuDeviceGet" => device as *const c_void,
            "cuDeviceGetUuid_v2" => uuid as *const c_void,
            "cuDeviceTotalMem_v2" => total as *const c_void,
            "cuDeviceGetPCIBusId" => pci as *const c_void,
            "cuDeviceGetAttribute" => attribute as *const c_void,
            "cuDeviceCanAccessPeer" => can_access as *const c_void,
            "cuDeviceGetP2PAtomicCapabilities" => link as *const c_void,
            "cuMemGetInfo_v2" => memory as *const c_void,
            "cuDevicePrimaryCtxRetain" => retain as *const c_void,
            "cuDevicePrimaryCtxReset_v2" => reset as *const c_void,
            "cuCtxCreate_v2" => create as *const c_void,
            "cuCtxDestroy_v2" => destroy as *const c_void,
            "cuCtxPopCurrent_v2" => pop as *const c_void,
            "cuCtxGetCurrent" => current as *const c_void,
            "cuCtxSetCurrent" => set_current as *const c_void,
            "cuCtxSetFlags" => set_flags as *const c_void,
            "cuCtxEnablePeerAccess" => enable as *const c_void,
            "cuCtxDisablePeerAccess" => disable as *const c_void,
            "cuMemSetAccess" => set_access as *const c_void,
            _ => nothing as *const c_void,
        })
    };
    // SAFETY: the functions have the signatures of their names; `nothing` looks at no parameter.
    unsafe { Driver::load(find) }.unwrap()
}

fn layer(per_gpu: u32, visible: Option<Vec<Uuid>>) -> Result<Layer, VirtualError> {
    Layer::new(driver(), &VirtualGpus { per_gpu, visible })
}

#[test]
fn each_gpu_is_so_many_with_a_part_of_its_memory() {
    let layer = layer(3, None).unwrap();
    let gpus: Vec<_> = layer.gpus().iter().map(|it| (it.real, it.part, it.leads, it.memory)).collect();
    let of = |real, part| (real, part, part == 0, 3333);
    assert_eq!(gpus, [of(0, 0), of(1, 0), of(0, 1), of(1, 1), of(0, 2), of(1, 2)]);
    assert_eq!((layer.gpus()[3].pci_bus_id.as_str(), layer.gpus()[3].part_of), ("2000:01:00.0", [1; 16]));
    assert_eq!((layer.attribute(PCI_DOMAIN_ID, 3), layer.attribute(16, 3)), (Ok(0x2000), Ok(2)));
    assert_eq!(layer.attribute(COOPERATIVE_MULTI_DEVICE_LAUNCH, 3), Ok(0));
    assert_eq!((layer.real(6), layer.real(-1)), (Err(CUDA_ERROR_INVALID_DEVICE), Err(CUDA_ERROR_INVALID_DEVICE)));
}

#[test]
fn a_worker_sees_those_that_it_is_told_in_its_order() {
    let all = layer(2, None).unwrap();
    let uuid = |at: usize| all.gpus()[at].uuid;
    let some = layer(2, Some(vec![uuid(3), uuid(2), uuid(1)])).unwrap();
    let gpus: Vec<_> = some.gpus().iter().map(|it| (it.uuid, it.leads)).collect();
    assert_eq!(gpus, [(uuid(3), true), (uuid(2), true), (uuid(1), false)], "the first of each GPU leads");
    let error = layer(2, Some(vec![[9; 16]])).err().unwrap().to_string();
    assert!(error.contains("no virtual GPU GPU-09090909"), "{error}");
}

#[test]
fn more_than_a_process_can_have_are_refused() {
    assert!(layer(8, None).is_ok());
    let error = layer(9, None).err().unwrap().to_string();
    assert!(error.contains("gpu.virtual = 9 shows 2 GPUs as 18, and a process can have 16"), "{error}");
}

#[test]
fn the_first_has_the_primary_context_and_others_have_one_that_stands_for_it() {
    let layer = layer(2, None).unwrap();
    assert_eq!((layer.retain(0), layer.retain(1)), (Ok(100), Ok(101)));
    let standing = layer.retain(2).unwrap();
    assert_eq!(layer.retain(2), Ok(standing), "it is one");
    assert_eq!(calls(), ["create on 0 with 0", "pop"]);

    layer.set_flags(2, 4).unwrap();
    assert_eq!((calls(), CURRENT.get()), (vec![format!("flags 4 of {standing}")], 0));
    layer.reset(2).unwrap();
    layer.reset(2).unwrap();
    layer.reset(1).unwrap();
    assert_eq!(calls(), [format!("destroy {standing}"), "reset 1".to_owned()]);
    // A reset forgets the flags; those that are set before the next context is made are its flags.
    layer.set_flags(2, 1).unwrap();
    assert_ne!(layer.retain(2), Ok(standing));
    assert_eq!(calls(), ["create on 0 with 1", "pop"]);
}

#[test]
fn parts_of_one_gpu_are_peers_without_the_driver() {
    let layer = layer(2, None).unwrap();
    assert_eq!([(0, 2), (2, 0), (2, 2), (0, 1)].map(|(a, b)| layer.can_access_peer(a, b)), [1, 1, 0, 0].map(Ok));
    // What a GPU does in its memory; between two GPUs, what the driver says of these.
    let capabilities = [(0, 2), (2, 1), (0, 9)].map(|(from, to)| layer.p2p_atomic_capability(9, from, to));
    let own = atomics::in_own_memory(9);
    assert_eq!(capabilities, [Ok(own), Ok(9101), Err(CUDA_ERROR_INVALID_DEVICE)]);
    let attributes: Vec<_> = (0..=6).map(|attribute| layer.p2p_attribute(attribute, 0, 2)).collect();
    let invalid = Err(CUDA_ERROR_INVALID_VALUE);
    assert_eq!(attributes, [invalid, Ok(0), Ok(1), Ok(1), Ok(0), Ok(0), invalid]);

    let contexts = [0, 1, 2, 3].map(|gpu| layer.retain(gpu).unwrap());
    calls();
    CURRENT.set(contexts[0]);
    assert_eq!(layer.disable_peer(contexts[2]), Err(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED));
    assert_eq!(layer.enable_peer(contexts[2], 1), Err(CUDA_ERROR_INVALID_VALUE));
    assert_eq!(layer.enable_peer(contexts[2], 0), Ok(()));
    assert_eq!(layer.enable_peer(contexts[2], 0), Err(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED));
    assert_eq!(layer.disable_peer(contexts[2]), Ok(()));
    assert_eq!(calls(), [""; 0]);

    // Across GPUs the driver opens a GPU, which stays open as long as any part of it is a peer.
    for gpu in [1, 3] {
        layer.enable_peer(contexts[gpu], 0).unwrap();
    }
    let opened = [1, 3].map(|gpu: usize| format!("enable {} with 0", contexts[gpu]));
    assert_eq!(calls(), opened);
    for gpu in [1, 3] {
        layer.disable_peer(contexts[gpu]).unwrap();
    }
    assert_eq!(calls(), [format!("disable {}", contexts[3])]);
    // A context of the same virtual GPU is no peer, and the driver says so.
    let other = layer.create_context(0, 0).unwrap();
    calls();
    layer.enable_peer(other, 0).unwrap();
    assert_eq!(calls(), [format!("enable {other} with 0")]);
}

#[test]
fn a_program_may_have_the_part_of_the_gpu_at_most() {
    let layer = layer(2, None).unwrap();
    CURRENT.set(layer.retain(2).unwrap());
    assert_eq!(layer.memory(), Ok((5000, 5000)));
}

#[test]
fn access_is_set_for_gpus_of_the_drivers() {
    const DEVICE: u32 = CU_MEM_LOCATION_TYPE_DEVICE;
    const HOST: u32 = CU_MEM_LOCATION_TYPE_HOST;
    let layer = layer(2, None).unwrap();
    let given = |all: &[(u32, i32, u32)]| -> Vec<_> {
        let one = |&(location_type, location_id, flags): &_| CUmemAccessDesc { location_type, location_id, flags };
        all.iter().map(one).collect()
    };
    layer.map(100, 10, 0, 1, 0).unwrap();
    layer.set_access(100, 10, &given(&[(DEVICE, 2, 3), (HOST, 0, 3), (DEVICE, 3, 1)])).unwrap();
    layer.set_access(100, 10, &given(&[(DEVICE, 0, 1)])).unwrap();
    layer.set_access(100, 10, &given(&[(DEVICE, 2, 0)])).unwrap();
    let expected = ["100, 10: [(1, 0, 3), (1, 1, 1), (2, 0, 3)]", "100, 10: [(1, 0, 3)]", "100, 10: [(1, 0, 1)]"];
    assert_eq!(calls(), expected);
    assert_eq!(layer.set_access(100, 10, &given(&[(DEVICE, 4, 3)])), Err(CUDA_ERROR_INVALID_DEVICE));
    // Where nothing is mapped any more, the driver answers.
    layer.unmap(100, 10).unwrap();
    layer.set_access(100, 10, &given(&[(DEVICE, 3, 3), (DEVICE, 1, 1)])).unwrap();
    assert_eq!(calls(), ["100, 10: [(1, 1, 3)]"]);
    let properties =
        CUmemAllocationProp { location_type: DEVICE, location_id: 3, kind: 1, ..CUmemAllocationProp::default() };
    let real = layer.properties(&properties).unwrap();
    assert_eq!((real.location_id, real.kind), (1, 1));
}
