//! Commands of the ring that are not lines of the driver table: what the hand-written calls of the interposer send.
//!
//! Each has a number, a name (which the object log keeps, since numbers may change) and the order of its parameters,
//! in the words and blobs of [`crate::codec`].

use rekindle_cuda_abi::table::Function;

/// The first number that is no line of the driver table.
pub const FIRST: u16 = 0x4000;

macro_rules! commands {
    ($($(#[$doc:meta])* $number:literal $name:ident;)*) => {
        $($(#[$doc])* pub const $name: u16 = FIRST + $number;)*
        const NAMES: &[(u16, &str)] = &[$(($name, stringify!($name))),*];
    };
}

commands! {
    /// Makes a device's primary context the client's. `context device flags` -> `api_version`. Waits.
    0 CONTEXT_RETAIN;
    /// Resets a primary context: everything in it is gone. `context`. Waits.
    1 CONTEXT_RESET;
    /// The last release of a primary context: everything in it goes; the next retain finds it as new. `context`. Does
    /// not wait, since programs do this when they end.
    7 CONTEXT_RELEASE;
    /// `cuCtxCreate`. `context device flags` -> `api_version`. Waits.
    2 CONTEXT_CREATE;
    /// `cuCtxDestroy`. `context`. Waits.
    3 CONTEXT_DESTROY;
    /// Waits for everything enqueued in a context so far. `context`. Waits.
    4 CONTEXT_SYNC;
    /// Waits for everything enqueued in a stream so far. `stream`. Waits.
    5 STREAM_SYNC;
    /// Waits for the event's last record. `event`. Waits.
    6 EVENT_SYNC;

    /// `cuStreamDestroy`: what was enqueued in it still runs to its end. `stream`. Does not wait.
    8 STREAM_DESTROY;

    /// Device memory in the current context's device. `size` -> `address rounded_size`. The error
    /// [`WINDOW_FULL`] asks the client to reserve more of the device's window, up to the address in the reply.
    /// Waits.
    16 MEM_ALLOC;
    /// Frees device memory after everything before it has finished. `address`. Waits.
    17 MEM_FREE;
    /// Says how far the client has reserved a device's window. `device end`. Does not wait.
    18 WINDOW_RESERVED;
    /// Registers pinned memory, whose memfd came over the connection. `address size flags serial`. Waits.
    19 PINNED_MAP;
    /// Unregisters and unmaps pinned memory, after everything before it has finished. `address`. Waits.
    20 PINNED_UNMAP;

    /// A copy between device and pinned memory, any direction. `destination source bytes stream`. Does not wait.
    32 COPY;
    /// A copy from bytes in the command to the device. `destination stream blob`. Does not wait.
    33 COPY_BYTES;
    /// A copy from a staging chunk to the device. `destination chunk bytes stream`. The chunk's word says when.
    34 COPY_FROM_CHUNK;
    /// A copy from the device to a staging chunk. `source chunk bytes stream`. The chunk's word says when.
    35 COPY_TO_CHUNK;

    /// A part of a code image. `image offset total blob`. Does not wait.
    48 CODE_PART;
    /// `cuModuleLoadDataEx`. `module image options_blob` -> `info_length error_length`, then each option's value, and
    /// nothing where there are no options. Waits.
    49 MODULE_LOAD;
    /// `cuLibraryLoadData`. As [`MODULE_LOAD`], with `library`. Waits.
    50 LIBRARY_LOAD;
    /// `module`. Waits.
    51 MODULE_UNLOAD;
    /// `library`. Waits.
    52 LIBRARY_UNLOAD;
    /// `function module name` -> the parameter layout: `count`, then `offset << 32 | size` for each. Waits.
    53 MODULE_FUNCTION;
    /// `kernel library name` -> as [`MODULE_FUNCTION`]. Waits.
    54 LIBRARY_KERNEL;
    /// `function kernel`: the kernel's function in the current context. Waits.
    55 KERNEL_FUNCTION;
    /// `module library`: the library's module in the current context. Waits.
    56 LIBRARY_MODULE;
    /// `module name` -> `address size`. Waits.
    57 MODULE_GLOBAL;
    /// `library name` -> `address size`. Waits.
    58 LIBRARY_GLOBAL;
    /// `module_or_library start` -> `total count`, then `name` blobs of the kernels from `start` on. Waits.
    59 KERNEL_NAMES;

    /// Not sent: the object log's record that a module or library was placed in a context. `parent`.
    60 INSTANTIATE;

    /// A kernel launch. `function grid_xy grid_z_block_x block_yz shared_flags stream attributes_blob
    /// parameters_blob`, see [`Launch`]. A function's first launch waits.
    64 LAUNCH;

    /// A copy of a box, see [`crate::boxes`]. Does not wait.
    256 COPY_BOX;
    /// A copy of a box from a staging chunk. The chunk's word says when.
    257 COPY_BOX_FROM_CHUNK;
    /// A copy of a box to a staging chunk. The chunk's word says when.
    258 COPY_BOX_TO_CHUNK;

    /// Not sent: a copy of a box from a staging chunk that is held, with the bytes in place of the chunk. As
    /// [`COPY_BOX_FROM_CHUNK`], and a blob.
    259 COPY_BOX_BYTES;

    /// `cuArray3DCreate`. `array width height depth format channels flags`. Waits.
    264 ARRAY_CREATE;
    /// Destroys an array after everything before it has finished. `array`. Waits.
    265 ARRAY_DESTROY;
    /// `cuMipmappedArrayCreate`. `mipmapped width height depth format channels flags levels`, then the handle of each
    /// level's array. Waits.
    266 MIPMAP_CREATE;
    /// Destroys a mipmapped array after everything before it has finished. `mipmapped`. Waits.
    267 MIPMAP_DESTROY;
    /// `cuTexObjectCreate`. `texture value resource_blob texture_blob view_blob` -> `value`. A value that is not 0 is
    /// the one that it must get: in the object log, which is replayed. Waits.
    272 TEXTURE_CREATE;
    /// `cuSurfObjectCreate`, as [`TEXTURE_CREATE`] with the last two blobs empty. Waits.
    273 SURFACE_CREATE;
    /// Destroys a texture or a surface. `texture`. Does not wait.
    274 TEXTURE_DESTROY;

    /// A host callback, at its place in a stream. `stream function data kind named`: the kind is [`HOST_FUNCTION`] or
    /// [`STREAM_CALLBACK`], and `named` the stream as the caller named it. Does not wait.
    384 HOST_FUNC;
    /// The application's callback thread asks for the next callback to run. `done` -> `id kind function data named
    /// status`: `done` is the id of the one that has returned, or 0. Waits until there is one.
    385 CALLBACK_NEXT;
    /// Waits until the worker holds few commands of the calling thread (see [`crate::layout::Header::pressure`]).
    386 HELD_ROOM;
    /// The calling thread ends, and its default streams with it. Does not wait.
    387 THREAD_END;
    /// Operations of a stream on words of memory, in their order. `stream blob`, see [`MemOp`]. Does not wait.
    388 MEM_OPS;
    /// `cuOccupancyMaxPotentialBlockSizeWithFlags` without a function. `function shared_bytes limit flags` -> `grid
    /// block`. Waits.
    448 OCCUPANCY_BLOCK_SIZE;

    /// `cuMemGetInfo` of the current context's device, as far as the client's limit lets it see -> `free total`. Waits.
    512 MEM_INFO;
    /// `cuOccupancyMaxActiveClusters`, or `cuOccupancyMaxPotentialClusterSize` where `sizes` is not 0. `sizes`, then
    /// as [`LAUNCH`] -> `number`. Waits.
    449 OCCUPANCY_CLUSTERS;
    /// A part of what kernels have printed -> `output more blob`: for stdout (0) or stderr (1), and whether there is more.
    /// Waits.
    450 PRINTS;
    /// Cooperative launches on several devices, `flags count`, then a blob for each as [`LAUNCH`]. Waits.
    451 LAUNCH_ON_DEVICES;
    /// `cuLinkCreate`. `linker options_blob`. Waits. The blob has a word for each option: its number, and its value in
    /// the upper half; of a log's buffer, whether there is one.
    452 LINK_CREATE;
    /// `cuLinkAddData`. `linker kind image name options_blob` -> as [`MODULE_LOAD`], for the linker's options. Waits.
    453 LINK_ADD;
    /// `cuLinkComplete`. `linker` -> `size`, then as [`LINK_ADD`]. Waits.
    454 LINK_COMPLETE;
    /// A part of the output. `linker offset` -> `blob`. Waits.
    455 LINK_OUTPUT;
    /// `cuLinkDestroy`. `linker`. Waits.
    456 LINK_DESTROY;
    /// A part of a log of the calling thread's last compilation. `which offset` -> `blob`: 0 is information, 1 errors.
    /// Waits.
    457 CODE_LOG;
    /// `cuMemPoolCreate`. `pool device maximum_size`. Waits.
    320 POOL_CREATE;
    /// Ends a pool; what was allocated from it stays. `pool`. Waits.
    321 POOL_DESTROY;
    /// Memory from a pool (0: the current one of the stream's device) in a stream's order. `pool size stream` ->
    /// `address device pool`, or [`WINDOW_FULL`] as of [`MEM_ALLOC`], with the device behind the address. Waits.
    322 POOL_ALLOC;
    /// Frees memory when the stream comes to it. `address stream`. Does not wait.
    323 POOL_FREE;
    /// Gives memory back that a pool does not use. `pool bytes_to_keep`. Waits.
    324 POOL_TRIM;
    /// An attribute of a pool. `pool attribute` -> `value`. Waits.
    325 POOL_GET;
    /// Sets an attribute. `pool attribute value`. Waits.
    326 POOL_SET;
    /// Lets another device use a pool's memory, or no longer. `pool device access`. Waits.
    327 POOL_SET_ACCESS;
    /// What a device may do. `pool device` -> `access`. Waits.
    328 POOL_GET_ACCESS;
    /// The pool that a device's allocations come from. `device` -> `pool`. Waits.
    329 POOL_CURRENT;
    /// Sets it. `device pool`. Waits.
    330 POOL_SET_CURRENT;

    /// Makes a graph of the driver's of a program. `exec image flags`: the program ([`crate::graph::Program`]) has come as
    /// a code image does. Waits.
    576 GRAPH_CREATE;
    /// A step of it is another from now on. `exec place blob`, see [`crate::graph::Step`]. Does not wait.
    577 GRAPH_SET;
    /// Launches it. `exec stream`. Does not wait.
    578 GRAPH_LAUNCH;
    /// `cuGraphUpload`. `exec stream`. Does not wait.
    579 GRAPH_UPLOAD;
    /// Ends it, once it has run to its end. `exec`. Does not wait.
    580 GRAPH_DESTROY;

    /// `cuCtxEnablePeerAccess` of the current context. `peer flags`. Waits.
    336 PEER_ENABLE;
    /// `cuCtxDisablePeerAccess`. `peer`. Waits.
    337 PEER_DISABLE;

    /// `cuMemAddressReserve` at a place that the client keeps free. `address size`. Waits.
    352 ADDRESS_RESERVE;
    /// `cuMemAddressFree`. `address size`. Waits.
    353 ADDRESS_FREE;
    /// `cuMemCreate`. `piece size device handle_types flags`, see [`PieceFlags`]. Waits.
    354 PIECE_CREATE;
    /// The client has no handle of a piece any more; it goes with its last mapping. `piece`. Waits.
    355 PIECE_RELEASE;
    /// The client has a handle again of a piece that is mapped. `piece`. Waits.
    356 PIECE_RETAIN;
    /// `cuMemMap`. `address size offset piece flags`. Waits.
    357 PIECE_MAP;
    /// `cuMemUnmap`, after everything before it has finished. `address size`. Waits.
    358 PIECE_UNMAP;
    /// `cuMemSetAccess`. `address size count`, then `device flags` for each. Waits.
    359 PIECE_ACCESS;
    /// `cuMemGetAllocationGranularity`. `option device handle_types flags` -> `granularity`. Waits.
    360 PIECE_GRANULARITY;
    /// Encodes a tensor map, see [`crate::tensor_map::Kind`]: `kind type rank address dims.. strides..`, then the call's
    /// further parameters in their order, arrays by their elements; or `kind address map_blob` -> `map_blob`. Waits.
    361 TENSOR_MAP;
    /// `cuIpcGetMemHandle`. `address` -> the token's two words, see [`crate::ipc`]. Waits.
    368 MEMORY_EXPORT;
    /// `cuMemExportToShareableHandle`. `piece` -> as [`MEMORY_EXPORT`]. Waits.
    369 PIECE_EXPORT;
    /// Pieces that came for this ticket become the client's. `ticket count`, then a handle for each -> `device offset
    /// size flags`, then the size of each. Waits. [`NO_TICKET`] where nothing came, or a restore
    /// was in between: then the daemon is asked again.
    370 PIECE_IMPORT;
    /// An event that has been created may be shared from now on. `event`. Waits.
    371 EVENT_SHARE;
    /// `cuIpcGetEventHandle`. `event` -> as [`MEMORY_EXPORT`]. Waits.
    372 EVENT_EXPORT;
    /// An event that has been created becomes the one that came for this ticket. `ticket event`. Waits, and may answer
    /// [`NO_TICKET`] as [`PIECE_IMPORT`].
    373 EVENT_OPEN;
    /// Answers when what came before it is known to all processes that share an event. Waits.
    374 EVENT_FENCE;
}

/// The commands of copies of boxes, arrays, textures and surfaces.
pub const SHAPES: std::ops::Range<u16> = FIRST + 256..FIRST + 320;

/// The commands whose first words are any word and a staging chunk, whose word says when they are done.
pub const THROUGH_CHUNK: &[u16] = &[COPY_FROM_CHUNK, COPY_TO_CHUNK, COPY_BOX_FROM_CHUNK, COPY_BOX_TO_CHUNK];

/// One operation of [`MEM_OPS`]: four words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemOp {
    /// `CUstreamBatchMemOpType`: waits for, or writes, 32 (1, 2) or 64 bits (4, 5); flushes (3); a barrier (6).
    pub operation: u32,
    /// Of the word.
    pub address: u64,
    /// To be written, or compared with.
    pub value: u64,
    /// `CU_STREAM_WAIT_VALUE_*` and the like.
    pub flags: u32,
}

/// Most operations that one [`MEM_OPS`] has, as in the driver.
pub const MAX_MEM_OPS: usize = 256;

impl MemOp {
    /// Bytes of the word that it is about, 0 for none.
    #[must_use]
    pub fn width(&self) -> u64 {
        match self.operation {
            1 | 2 => 4,
            4 | 5 => 8,
            _ => 0,
        }
    }

    /// Appends its words.
    pub fn write(&self, w: &mut crate::codec::Writer) {
        [u64::from(self.operation), self.address, self.value, u64::from(self.flags)]
            .into_iter()
            .for_each(|x| w.word(x));
    }

    /// Takes what [`MemOp::write`] appended.
    pub fn read(r: &mut crate::codec::Reader<'_>) -> Result<Self, crate::codec::Malformed> {
        Ok(Self { operation: r.word32()?, address: r.word()?, value: r.word()?, flags: r.word32()? })
    }
}

/// The kind of a callback of `cuLaunchHostFunc`: not called in a broken context.
pub const HOST_FUNCTION: u64 = 0;
/// The kind of a callback of `cuStreamAddCallback`: always called, and told of an error.
pub const STREAM_CALLBACK: u64 = 1;

/// The result of [`MEM_ALLOC`] that asks for more of the window; no driver error has this number.
pub const WINDOW_FULL: i32 = 1_000_001;

/// The result of [`PIECE_IMPORT`] for a ticket that the worker does not know; no driver error has this number.
pub const NO_TICKET: i32 = 1_000_002;

/// Launch attributes that travel as they are: ignore 0, access policy window 1 (a range of device memory), cooperative
/// 2, synchronisation policy 3, cluster dimension 4, cluster scheduling 5, programmatic stream serialisation 6, priority
/// 8, memory synchronisation domain map 9 and domain 10, preferred cluster 11, shared memory carve-out 14, NVLink-centric
/// scheduling 16. Device-updatable nodes (13) belong to graphs.
pub const PLAIN_ATTRIBUTES: &[u32] = &[0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 14, 16];

/// Launch attributes whose first word is an event's handle: programmatic event 7, launch completion event 12.
pub const EVENT_ATTRIBUTES: &[u32] = &[7, 12];

/// In [`Launch::flags`]: a cooperative launch.
pub const COOPERATIVE: u32 = 1;

/// Bytes of an attribute: its id, and eight words.
pub const ATTRIBUTE_BYTES: usize = 72;

/// The parameters of [`LAUNCH`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch<'a> {
    /// A function or kernel handle.
    pub function: u64,
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads of a block in each dimension.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// [`COOPERATIVE`] and others to come.
    pub flags: u32,
    /// The stream's handle.
    pub stream: u64,
    /// `CUlaunchAttribute` array, as bytes.
    pub attributes: &'a [u8],
    /// The kernel's parameters at their offsets.
    pub parameters: &'a [u8],
}

impl<'a> Launch<'a> {
    /// Appends the launch's words and blobs.
    pub fn write(&self, w: &mut crate::codec::Writer) {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        w.word(self.function);
        w.word(pair(self.grid[0], self.grid[1]));
        w.word(pair(self.grid[2], self.block[0]));
        w.word(pair(self.block[1], self.block[2]));
        w.word(pair(self.shared_bytes, self.flags));
        w.word(self.stream);
        w.blob(self.attributes);
        w.blob(self.parameters);
    }

    /// The handles of the events that the launch records by its attributes.
    pub fn events(&self) -> impl Iterator<Item = u64> {
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        let attributes = self.attributes.chunks_exact(ATTRIBUTE_BYTES).map(move |a| (word(&a[..8]), word(&a[8..16])));
        attributes.filter(|(id, _)| EVENT_ATTRIBUTES.iter().any(|e| u64::from(*e) == *id)).map(|(_, event)| event)
    }

    /// Takes what [`Launch::write`] appended.
    pub fn read(r: &mut crate::codec::Reader<'a>) -> Result<Self, crate::codec::Malformed> {
        let pair = |w: u64| (w as u32, (w >> 32) as u32);
        let function = r.word()?;
        let (grid_x, grid_y) = pair(r.word()?);
        let (grid_z, block_x) = pair(r.word()?);
        let (block_y, block_z) = pair(r.word()?);
        let (shared_bytes, flags) = pair(r.word()?);
        let stream = r.word()?;
        let attributes = r.blob()?;
        let parameters = r.blob()?;
        r.end()?;
        Ok(Self {
            function,
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
            flags,
            stream,
            attributes,
            parameters,
        })
    }
}

/// The name of a call number: a command's, or the symbol in its line of the table.
pub fn name(table: &[Function], call: u16) -> Option<&str> {
    if call < FIRST {
        return table.get(call as usize).map(|f| f.symbol.as_str());
    }
    NAMES.iter().find(|n| n.0 == call).map(|n| n.1)
}

/// The number of a name that the object log kept.
pub fn number(table: &[Function], name: &str) -> Option<u16> {
    let command = NAMES.iter().find(|n| n.1 == name).map(|n| n.0);
    command.or_else(|| table.iter().position(|f| f.symbol == name).map(|i| i as u16))
}

/// `allocFlags` of `CUmemAllocationProp`, as a word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PieceFlags {
    /// `compressionType`.
    pub compression: u8,
    /// `gpuDirectRDMACapable`.
    pub rdma: u8,
    /// `usage`.
    pub usage: u16,
}

impl PieceFlags {
    /// The word.
    pub fn word(self) -> u64 {
        u64::from(self.compression) | u64::from(self.rdma) << 8 | u64::from(self.usage) << 16
    }

    /// What [`PieceFlags::word`] gave.
    pub fn of(word: u64) -> Self {
        Self { compression: word as u8, rdma: (word >> 8) as u8, usage: (word >> 16) as u16 }
    }
}

/// The kinds of objects that a handle can name. A handle is the kind in its upper 16 bits, and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u16)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Kind {
    Context = 0x11,
    Module = 0x12,
    Library = 0x13,
    Function = 0x14,
    Kernel = 0x15,
    Stream = 0x16,
    Event = 0x17,
    Array = 0x18,
    MipmappedArray = 0x19,
    TexObject = 0x1a,
    SurfObject = 0x1b,
    Linker = 0x1d,
    MemPool = 0x1c,
    GraphExec = 0x1e,
    Piece = 0x20,
}

/// The handle of a device's default pool, which is there without being created.
pub fn default_pool(device: usize) -> u64 {
    Kind::MemPool.handle(0x1_0000_0000 + device as u64)
}

impl Kind {
    /// The handle with this number. Never a canonical address, so that who dereferences it finds out.
    pub fn handle(self, number: u64) -> u64 {
        (self as u64) << 48 | (number & 0xffff_ffff_ffff)
    }

    /// Whether a handle is of this kind.
    pub fn owns(self, handle: u64) -> bool {
        handle >> 48 == self as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{Reader, Writer};

    #[test]
    fn a_launch_reads_as_it_was_written() {
        let launch = Launch {
            function: 1,
            grid: [2, 3, 4],
            block: [5, 6, 7],
            shared_bytes: 8,
            flags: COOPERATIVE,
            stream: 9,
            attributes: &[1; 72],
            parameters: b"parameters",
        };
        let mut w = Writer::new();
        launch.write(&mut w);
        assert_eq!(Launch::read(&mut Reader::new(w.bytes())), Ok(launch));
        assert!(Launch::read(&mut Reader::new(&w.bytes()[..40])).is_err());
    }

    #[test]
    fn names_and_numbers_belong_together() {
        let table = rekindle_cuda_abi::table::parse(rekindle_cuda_abi::table::TEXT).unwrap();
        assert_eq!(number(&table, name(&table, LAUNCH).unwrap()), Some(LAUNCH));
        assert_eq!(number(&table, name(&table, 17).unwrap()), Some(17));
        assert_eq!(name(&table, FIRST - 1), None);
        assert!(table.len() < FIRST as usize);
    }
}
