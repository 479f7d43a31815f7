//! The commands that are not lines of the driver table, each once. [`declare`](super::declare) says how to read them.
//! A reply, where there is one, stands behind `->`. "Waits" is said of a command whose sender waits for the reply.

use std::ffi::CStr;

use super::declare::{Clause, Declaration, Parameters, clause, commands, layout, parameters, place};
use super::field::{Field, Half, Rest};
use super::{FIRST, PieceFlags};
use crate::boxes::End;
use crate::codec::{Malformed, Reader, Writer};

commands! {
    struct MakeContext { context: u64, device: u64, flags: u32 }
        /// Makes a device's primary context the client's. -> `api_version`. Waits.
        0 CONTEXT_RETAIN: renews(context, device);
        /// `cuCtxCreate`. -> `api_version`. Waits.
        2 CONTEXT_CREATE;

    struct EndContext { context: u64 }
        /// Resets a primary context: everything in it is gone. Waits.
        1 CONTEXT_RESET: ends_context(context);
        /// The last release of a primary context: everything in it goes; the next retain finds it as new. Does not wait,
        /// since programs do this when they end.
        7 CONTEXT_RELEASE: ends_context(context);
        /// `cuCtxDestroy`. Waits.
        3 CONTEXT_DESTROY: ends_context(context);
        /// `cuGreenCtxDestroy`, of the context that it was converted into. Waits.
        613 GREEN_CONTEXT_DESTROY: ends_context(context);

    struct SyncContext { context: u64 }
        /// Waits for everything enqueued in a context so far.
        4 CONTEXT_SYNC: after_context(context);

    struct OfStream { stream: u64 }
        /// Waits for everything enqueued in a stream so far.
        5 STREAM_SYNC: in_stream(stream);
        /// `cuStreamDestroy`: what was enqueued in it still runs to its end. Does not wait.
        8 STREAM_DESTROY: in_stream(stream);

    struct SyncEvent { event: u64 }
        /// Waits for the event's last record.
        6 EVENT_SYNC: waits_for(event);

    struct MemAlloc { bytes: u64 }
        /// Device memory in the current context's device. -> `address rounded_size`. The error [`WINDOW_FULL`] asks the
        /// client to reserve more of the device's window, up to the address in the reply. Waits.
        ///
        /// [`WINDOW_FULL`]: super::WINDOW_FULL
        16 MEM_ALLOC;

    struct MemFree { address: u64 }
        /// Frees device memory after everything before it has finished. Waits.
        17 MEM_FREE: after_everything;

    struct WindowReserved { device: u64, end: u64 }
        /// Says how far the client has reserved a device's window. Does not wait.
        18 WINDOW_RESERVED;

    struct PinnedMap { address: u64, size: u64, flags: u32, serial: u64 }
        /// Registers pinned memory, whose memfd came over the connection. Waits.
        19 PINNED_MAP;

    struct PinnedUnmap { address: u64 }
        /// Unregisters and unmaps pinned memory, after everything before it has finished. Waits.
        20 PINNED_UNMAP: after_everything;

    struct ManagedMap { address: u64, size: u64, serial: u64 }
        /// Device memory is managed memory from now on: the client has pages of a memfd at the same address, whose file came over
        /// the connection with a userfaultfd, see [`crate::userfault`]. The device has the content. Waits.
        21 MANAGED_MAP;

    struct ManagedUnmap { address: u64 }
        /// It is device memory alone again, after everything before it has finished. Waits.
        22 MANAGED_UNMAP: after_everything;

    struct ManagedToDevice { address: u64, bytes: u64 }
        /// Not sent: the worker itself copies what the client has written to the device, before a command that may use it.
        23 MANAGED_TO_DEVICE: writes(address, bytes);

    struct ManagedVariable {
        /// The module or library.
        parent: u64,
        address: u64,
        size: u64,
        /// Where its pages begin that no other variable has, and how many bytes of them there are, or 0.
        pages: u64,
        length: u64,
        /// The number of these pages' memfd.
        serial: u64,
    }
        /// A variable of the current context is managed memory from now on, as by [`MANAGED_MAP`], in pages that it may share with
        /// other such variables. It ends with its code. Waits.
        24 MANAGED_VARIABLE;

    struct MemInfo {}
        /// `cuMemGetInfo` of the current context's device, as far as the client's limit lets it see. -> `free total`.
        /// Waits.
        512 MEM_INFO;

    struct CopyMemory { destination: u64, source: u64, bytes: u64, stream: u64 }
        /// A copy between device and pinned memory, any direction. Does not wait.
        32 COPY: in_stream(stream), writes(destination, bytes), reads(source, bytes);

    struct CopyBytes<'a> { destination: u64, stream: u64, bytes: &'a [u8] }
        /// A copy from bytes in the command to the device. Does not wait.
        33 COPY_BYTES: in_stream(stream), writes(destination, bytes);

    struct CopyChunk { device: u64, chunk: u64, bytes: u64, stream: u64 }
        /// A copy from a staging chunk to the device. The chunk's word says when.
        34 COPY_FROM_CHUNK: in_stream(stream), through(chunk), writes(device, bytes);
        /// A copy from the device to a staging chunk. The chunk's word says when.
        35 COPY_TO_CHUNK: in_stream(stream), through(chunk), reads(device, bytes);

    struct CopyBox {
        /// Any number.
        first: u64,
        /// Any number.
        second: u64,
        /// The destination.
        end: End,
        source: End,
        /// Bytes of a row, rows, slices.
        size: [u64; 3],
        stream: u64,
    }
        /// A copy of a box between two ends within the worker's reach, see [`crate::boxes`]. Does not wait.
        256 COPY_BOX: in_stream(stream), writes_box(end, size), reads_box(source, size);

    struct CopyBoxChunk {
        /// Any number.
        first: u64,
        chunk: u64,
        end: End,
        /// Bytes of a row, rows, slices.
        size: [u64; 3],
        stream: u64,
    }
        /// A copy of a box from a staging chunk. The chunk's word says when.
        257 COPY_BOX_FROM_CHUNK: in_stream(stream), through(chunk), writes_box(end, size);
        /// A copy of a box to a staging chunk. The chunk's word says when.
        258 COPY_BOX_TO_CHUNK: in_stream(stream), through(chunk), reads_box(end, size);

    struct CopyBoxBytes<'a> {
        /// Any number.
        first: u64,
        /// Any number.
        second: u64,
        end: End,
        /// Bytes of a row, rows, slices.
        size: [u64; 3],
        stream: u64,
        bytes: &'a [u8],
    }
        /// Not sent: a deferred copy of a box from a staging chunk, with the bytes in place of the chunk.
        259 COPY_BOX_BYTES: in_stream(stream), writes_box(end, size);

    struct CodePart<'a> { image: u64, offset: u64, total: u64, bytes: &'a [u8] }
        /// A part of a code image. Does not wait.
        48 CODE_PART;

    struct LoadCode<'a> {
        /// A new handle, of a module or a library.
        handle: u64,
        image: u64,
        /// A word for each option: its number, and its value in the upper half; of a log's buffer, whether there is one.
        options: &'a [u8],
    }
        /// `cuModuleLoadDataEx`. -> `info_length error_length`, then each option's value, and nothing where there are no
        /// options. Waits.
        49 MODULE_LOAD;
        /// `cuLibraryLoadData`. As [`MODULE_LOAD`]. Waits.
        50 LIBRARY_LOAD;

    struct UnloadCode { handle: u64 }
        /// `cuModuleUnload`. Waits.
        51 MODULE_UNLOAD: after_everything, at_rest;
        /// `cuLibraryUnload`. Waits.
        52 LIBRARY_UNLOAD: after_everything, at_rest;

    struct FindFunction<'a> {
        /// A new handle.
        function: u64,
        /// The module or library.
        parent: u64,
        name: &'a CStr,
    }
        /// `cuModuleGetFunction`. -> the parameter layout: `count`, then `offset << 32 | size` for each. Waits.
        53 MODULE_FUNCTION;
        /// `cuLibraryGetKernel`. -> as [`MODULE_FUNCTION`]. Waits.
        54 LIBRARY_KERNEL;

    struct KernelFunction {
        /// A new handle.
        function: u64,
        kernel: u64,
    }
        /// The kernel's function in the current context. Waits.
        55 KERNEL_FUNCTION;

    struct LibraryModule {
        /// A new handle.
        module: u64,
        library: u64,
    }
        /// The library's module in the current context. Waits.
        56 LIBRARY_MODULE;

    struct FindGlobal<'a> {
        /// The module or library.
        parent: u64,
        name: &'a CStr,
    }
        /// `cuModuleGetGlobal`. -> `address size`, and whether it is a managed variable. Waits.
        57 MODULE_GLOBAL;
        /// `cuLibraryGetGlobal`. -> as [`MODULE_GLOBAL`]. Waits.
        58 LIBRARY_GLOBAL;

    struct KernelNames {
        /// The module or library.
        parent: u64,
        start: u64,
    }
        /// -> `total count`, then `name` blobs of the kernels from `start` on. Waits.
        59 KERNEL_NAMES;

    struct Instantiate {
        /// The module or library.
        parent: u64,
    }
        /// Not sent: the object log's record that a module or library was placed in a context.
        60 INSTANTIATE;

    struct Launch<'a> {
        /// A function or kernel handle.
        function: u64,
        /// Blocks in each dimension.
        grid: [u32; 3],
        /// Threads of a block in each dimension.
        block: [u32; 3],
        /// Bytes of dynamic shared memory.
        shared_bytes: u32 as Half,
        /// [`COOPERATIVE`](super::COOPERATIVE) and others to come.
        flags: u32 as Half,
        /// The stream's handle.
        stream: u64,
        /// `CUlaunchAttribute` array, as bytes.
        attributes: &'a [u8],
        /// The kernel's parameters at their offsets.
        parameters: &'a [u8],
    }
        /// A kernel launch. A function's first launch waits.
        64 LAUNCH: in_stream(stream), records_by(attributes), launches;

    struct LaunchOnDevices<'a> {
        flags: u32,
        /// Each a [`Launch`].
        launches: Vec<&'a [u8]>,
    }
        /// Cooperative launches on several devices. Waits.
        451 LAUNCH_ON_DEVICES: after_everything, launches_each(launches);

    struct OccupancyBlockSize { function: u64, shared_bytes: u64, limit: i32, flags: u32 }
        /// `cuOccupancyMaxPotentialBlockSizeWithFlags` without a function. -> `grid block`. Waits.
        448 OCCUPANCY_BLOCK_SIZE;

    struct OccupancyClusters<'a> {
        /// Whether sizes are asked for.
        sizes: u64,
        launch: Launch<'a>,
    }
        /// `cuOccupancyMaxActiveClusters`, or `cuOccupancyMaxPotentialClusterSize` where `sizes` is not 0. -> `number`.
        /// Waits.
        449 OCCUPANCY_CLUSTERS;

    struct Prints {}
        /// A part of what kernels have printed. -> `output more blob`: for stdout (0) or stderr (1), and whether there is
        /// more. Waits.
        450 PRINTS;

    struct LinkCreate<'a> {
        /// A new handle.
        linker: u64,
        /// As of [`LoadCode`].
        options: &'a [u8],
    }
        /// `cuLinkCreate`. Waits.
        452 LINK_CREATE;

    struct LinkAdd<'a> {
        linker: u64,
        kind: u32,
        image: u64,
        name: &'a CStr,
        /// As of [`LoadCode`].
        options: &'a [u8],
    }
        /// `cuLinkAddData`. -> as [`MODULE_LOAD`], for the linker's options. Waits.
        453 LINK_ADD;

    struct OfLinker { linker: u64 }
        /// `cuLinkComplete`. -> `size`, then as [`LINK_ADD`]. Waits.
        454 LINK_COMPLETE;
        /// `cuLinkDestroy`. Waits.
        456 LINK_DESTROY;

    struct LinkOutput { linker: u64, offset: u64 }
        /// A part of the output. -> `blob`. Waits.
        455 LINK_OUTPUT;

    struct CodeLog {
        /// 0 is information, 1 errors.
        which: u64,
        offset: u64,
    }
        /// A part of a log of the calling thread's last compilation. -> `blob`. Waits.
        457 CODE_LOG;

    struct ArrayCreate {
        /// A new handle.
        array: u64,
        /// Width, height, depth.
        size: [u64; 3],
        format: u32,
        channels: u32,
        flags: u32,
    }
        /// `cuArray3DCreate`. Waits.
        264 ARRAY_CREATE;

    struct MipmapCreate {
        /// A new handle.
        mipmapped: u64,
        /// Width, height, depth.
        size: [u64; 3],
        format: u32,
        channels: u32,
        flags: u32,
        /// A new handle for each level's array.
        levels: Vec<u64>,
    }
        /// `cuMipmappedArrayCreate`. Waits.
        266 MIPMAP_CREATE;

    struct ArrayDestroy { array: u64 }
        /// Destroys an array after everything before it has finished: the driver waits for all streams, host callbacks
        /// included (driver 580, an H100). Waits.
        265 ARRAY_DESTROY: after_everything;
        /// Destroys a mipmapped array after everything before it has finished. Waits.
        267 MIPMAP_DESTROY: after_everything;

    struct TextureCreate<'a> {
        /// A new handle.
        handle: u64,
        /// A value that is not 0 is the one that it must get: in the object log, which is replayed.
        value: u64,
        /// `CUDA_RESOURCE_DESC`.
        resource: &'a [u8],
        /// `CUDA_TEXTURE_DESC`; of a surface, nothing.
        texture: &'a [u8],
        /// `CUDA_RESOURCE_VIEW_DESC`, or nothing; of a surface, nothing.
        view: &'a [u8],
    }
        /// `cuTexObjectCreate`. -> `value`. Waits.
        272 TEXTURE_CREATE;
        /// `cuSurfObjectCreate`. -> `value`. Waits.
        273 SURFACE_CREATE;

    struct TextureDestroy { handle: u64 }
        /// Destroys a texture or a surface after everything before it has finished; its sender does not wait.
        274 TEXTURE_DESTROY: after_everything;

    struct PoolCreate {
        /// A new handle.
        pool: u64,
        device: u64,
        maximum: u64,
    }
        /// `cuMemPoolCreate`. Waits.
        320 POOL_CREATE;

    struct PoolDestroy { pool: u64 }
        /// Ends a pool; what was allocated from it stays. Waits.
        321 POOL_DESTROY;

    struct PoolAlloc {
        /// 0 is the current pool of the stream's device.
        pool: u64,
        bytes: u64,
        stream: u64,
    }
        /// Memory from a pool in a stream's order. It is there at once, whatever is deferred in the stream that gets it.
        /// -> `address device pool`, or [`WINDOW_FULL`](super::WINDOW_FULL) as of [`MEM_ALLOC`], with the device behind
        /// the address. Waits.
        322 POOL_ALLOC;

    struct PoolFree { address: u64, stream: u64 }
        /// Frees memory when the stream comes to it. Does not wait.
        323 POOL_FREE: in_stream(stream);

    struct PoolTrim {
        pool: u64,
        /// Bytes that stay.
        keep: u64,
    }
        /// Gives memory back that a pool does not use. Waits.
        324 POOL_TRIM;

    struct PoolGet { pool: u64, attribute: u32 }
        /// An attribute of a pool. -> `value`. Waits.
        325 POOL_GET;

    struct PoolSet { pool: u64, attribute: u32, value: u64 }
        /// Sets an attribute. Waits.
        326 POOL_SET;

    struct PoolSetAccess { pool: u64, device: u64, access: u32 }
        /// Lets another device use a pool's memory, or no longer. Waits.
        327 POOL_SET_ACCESS;

    struct PoolGetAccess { pool: u64, device: u64 }
        /// What a device may do. -> `access`. Waits.
        328 POOL_GET_ACCESS;

    struct PoolCurrent { device: u64 }
        /// The pool that a device's allocations come from. -> `pool`. Waits.
        329 POOL_CURRENT;

    struct PoolSetCurrent { device: u64, pool: u64 }
        /// Sets it. Waits.
        330 POOL_SET_CURRENT;

    struct PoolExport { pool: u64 }
        /// `cuMemPoolExportToShareableHandle`: names a pool for other processes. -> as [`MEMORY_EXPORT`]. Waits.
        331 POOL_EXPORT;

    struct PoolMemoryExport {
        /// The first address of an allocation from a pool.
        address: u64,
    }
        /// `cuMemPoolExportPointer`: names the pool, and the segment of it that the allocation is in. -> the segment's name, the
        /// pool's (each as of [`MEMORY_EXPORT`]), `offset size`. Waits.
        332 POOL_MEMORY_EXPORT;

    struct PeerEnable {
        /// A context.
        peer: u64,
        flags: u32,
    }
        /// `cuCtxEnablePeerAccess` of the current context. What is deferred in the meantime was enqueued with the access
        /// that there was. Waits.
        336 PEER_ENABLE;

    struct PeerDisable {
        /// A context.
        peer: u64,
    }
        /// `cuCtxDisablePeerAccess`. Waits.
        337 PEER_DISABLE: after_everything;

    struct AddressRange { address: u64, size: u64 }
        /// `cuMemAddressReserve` at a place that the client keeps free. Waits.
        352 ADDRESS_RESERVE;
        /// `cuMemAddressFree`. Waits.
        353 ADDRESS_FREE;
        /// `cuMemUnmap`, after everything before it has finished. Waits.
        358 PIECE_UNMAP: after_everything;

    struct PieceCreate {
        /// A new handle.
        piece: u64,
        size: u64,
        device: u64,
        handle_types: u32,
        flags: PieceFlags,
    }
        /// `cuMemCreate`. Waits.
        354 PIECE_CREATE;

    struct OfPiece { piece: u64 }
        /// The client has no handle of a piece any more; it goes with its last mapping. Waits.
        355 PIECE_RELEASE;
        /// The client has a handle again of a piece that is mapped. Waits.
        356 PIECE_RETAIN;
        /// `cuMemExportToShareableHandle`. -> as [`MEMORY_EXPORT`]. Waits.
        369 PIECE_EXPORT;

    struct PieceMap { address: u64, size: u64, offset: u64, piece: u64, flags: u64 }
        /// `cuMemMap`. Waits.
        357 PIECE_MAP;

    struct PieceAccess {
        address: u64,
        size: u64,
        /// Devices, and what each may do.
        access: Vec<(u64, u32)>,
    }
        /// `cuMemSetAccess`. Waits.
        359 PIECE_ACCESS;

    struct PieceGranularity { option: u32, device: u64, handle_types: u32, flags: PieceFlags }
        /// `cuMemGetAllocationGranularity`. -> `granularity`. Waits.
        360 PIECE_GRANULARITY;

    struct TensorMap<'a> {
        /// A [`Kind`](crate::tensor_map::Kind).
        kind: u64,
        /// `type rank address dims.. strides..`, then the call's further parameters in their order, arrays by their
        /// elements; or `address map_blob`, of a map whose address is replaced.
        rest: &'a [u8] as Rest,
    }
        /// Encodes a tensor map. -> `map_blob`. Waits.
        361 TENSOR_MAP;

    struct MemoryExport { address: u64 }
        /// `cuIpcGetMemHandle`. -> the token's two words, see [`crate::ipc`]. Waits.
        368 MEMORY_EXPORT;

    struct PieceImport {
        ticket: u64,
        /// A new handle for each piece.
        pieces: Vec<u64>,
    }
        /// Pieces that came for this ticket become the client's. -> `device offset size flags`, then the size of each.
        /// [`NO_TICKET`](super::NO_TICKET) where nothing came, or a restore was in between: then the daemon is asked
        /// again. Waits.
        370 PIECE_IMPORT;

    struct OfEvent { event: u64 }
        /// An event that has been created may be shared from now on. Waits.
        371 EVENT_SHARE;
        /// `cuIpcGetEventHandle`. -> as [`MEMORY_EXPORT`]. Waits.
        372 EVENT_EXPORT;

    struct EventOpen { ticket: u64, event: u64 }
        /// An event that has been created becomes the one that came for this ticket. May answer
        /// [`NO_TICKET`](super::NO_TICKET) as [`PIECE_IMPORT`]. Waits.
        373 EVENT_OPEN;

    struct EventFence {}
        /// Answers when what came before it is known to all processes that share an event. Waits.
        374 EVENT_FENCE;

    struct HostFunc {
        stream: u64,
        function: u64,
        data: u64,
        /// [`HOST_FUNCTION`](super::HOST_FUNCTION) or [`STREAM_CALLBACK`](super::STREAM_CALLBACK).
        kind: u64,
        /// The stream as the caller named it.
        named: u64,
    }
        /// A host callback, at its place in a stream. Does not wait.
        384 HOST_FUNC: in_stream(stream), callback;

    struct CallbackNext {
        /// The id of the one that has returned, or 0.
        done: u64,
    }
        /// The application's callback thread asks for the next callback to run. -> `id kind function data named status`.
        /// Waits until there is one.
        385 CALLBACK_NEXT;

    struct HeldRoom {}
        /// Waits until the worker has deferred few commands of the calling thread (see
        /// [`crate::layout::Header::pressure`]).
        386 HELD_ROOM;

    struct ThreadEnd {}
        /// The calling thread ends, and its default streams with it. Does not wait.
        387 THREAD_END: after_everything;

    struct MemOps<'a> {
        stream: u64,
        /// [`MemOp`](super::MemOp)s.
        operations: &'a [u8],
    }
        /// Operations of a stream on words of memory, in their order. Does not wait.
        388 MEM_OPS: in_stream(stream), operates(operations);

    struct GraphCreate {
        /// A new handle.
        exec: u64,
        /// The program ([`crate::graph::Program`]) has come as a code image does.
        image: u64,
        flags: u64,
    }
        /// Makes a graph of the driver's of a program. Waits.
        576 GRAPH_CREATE;

    struct GraphSet<'a> {
        exec: u64,
        place: u64,
        /// A [`Step`](crate::graph::Step).
        step: &'a [u8],
    }
        /// A step of it is another from now on, for the launches behind it. Does not wait.
        577 GRAPH_SET: alone(exec);

    struct GraphInStream { exec: u64, stream: u64 }
        /// Launches it. Launches of one graph follow each other. Does not wait.
        578 GRAPH_LAUNCH: in_stream(stream), alone(exec), launches_graph(exec);
        /// `cuGraphUpload`. Does not wait.
        579 GRAPH_UPLOAD: in_stream(stream), alone(exec);

    struct GraphDestroy { exec: u64 }
        /// Ends it, once it has run to its end. Does not wait.
        580 GRAPH_DESTROY: alone(exec);

    struct ResourceOfDevice {
        /// A new handle.
        resource: u64,
        device: u64,
        /// The multiprocessors that the resource must have: in the object log, which is replayed. 0 where it may have any.
        expected: u64,
    }
        /// The multiprocessors of a device. -> a resource: `count smallest_part alignment`. Waits.
        608 RESOURCE_OF_DEVICE;

    struct ResourceOfContext {
        /// A new handle.
        resource: u64,
        /// What a green context of this device would be made of.
        descriptor: u64,
        device: u64,
        /// As of [`ResourceOfDevice`].
        expected: u64,
    }
        /// The multiprocessors of green contexts that are made of a descriptor. -> as [`RESOURCE_OF_DEVICE`]. Waits.
        609 RESOURCE_OF_CONTEXT;

    struct ResourceSplit {
        /// The resource to split.
        resource: u64,
        flags: u32,
        least: u32,
        /// A new handle for what is left, or 0.
        rest: u64,
        /// A new handle for each part; without any the driver only counts the parts that there would be.
        parts: Vec<u64>,
        /// As of [`ResourceOfDevice`], of each part and of the rest; or nothing.
        expected: Vec<u64>,
    }
        /// `cuDevSmResourceSplitByCount`. -> the number of parts; then each part, and the rest, as of
        /// [`RESOURCE_OF_DEVICE`]. Waits.
        610 RESOURCE_SPLIT;

    struct ResourceDescribe {
        /// A new handle.
        descriptor: u64,
        resources: Vec<u64>,
    }
        /// `cuDevResourceGenerateDesc`. Waits.
        611 RESOURCE_DESCRIBE;

    struct MakeGreenContext {
        /// A new handle, of the context that the green context is converted into.
        context: u64,
        /// The primary context of its device.
        primary: u64,
        descriptor: u64,
        flags: u32,
    }
        /// `cuGreenCtxCreate`. Waits.
        612 GREEN_CONTEXT_CREATE;

    struct ContextEvent { context: u64, event: u64 }
        /// `cuCtxRecordEvent`, or `cuGreenCtxRecordEvent` where the context is a green one's. Waits, so that nothing that is
        /// deferred comes between it and what its caller does next.
        614 CONTEXT_RECORD: after_everything;
        /// `cuCtxWaitEvent`, or `cuGreenCtxWaitEvent`. Waits, as [`CONTEXT_RECORD`].
        615 CONTEXT_WAIT: after_everything;
}
