//! The form of a command's declaration, and the macro that reads it. The declarations themselves are in
//! [`list`](super::list).
//!
//! ```text
//! struct CopyMemory { destination: u64, source: u64, bytes: u64, stream: u64 }      the parameters, in their order
//!     /// A copy between device and pinned memory, any direction. Does not wait.
//!     32 COPY: in_stream(stream), writes(destination, bytes), reads(source, bytes);  number, name, and what it does
//! ```
//!
//! Commands with the same parameters stand below one structure. A structure's types are those of [`field`](super::field);
//! what its fields mean to the worker is said behind the name:
//!
//! | clause | meaning |
//! |---|---|
//! | `in_stream(stream)` | enqueued in the stream that the field names |
//! | `waits_for(event)` | makes the caller wait for the event's last record |
//! | `records_by(attributes)` | records the events that the launch attributes in the field name |
//! | `alone(handle)` | no other command that is alone with this handle, or destroys it, changes places with it |
//! | `after_everything`, `after_context(context)` | after all commands before it, of all contexts or of one |
//! | `at_rest` | executed when the device is at rest in all streams |
//! | `ends_context(context)` | as `after_context`, and executed when the device is at rest |
//! | `renews(context, device)` | of the context in the field, not the current one; executed when the device is at rest, where the device's context was used and let go |
//! | `callback` | the application runs it when the stream has come to it |
//! | `through(chunk)` | the staging chunk's word says when it is done |
//! | `writes(address, bytes)`, `reads(address, bytes)` | what it does to memory; `bytes` is a number, or the blob with the bytes |
//! | `writes_box(end, size)`, `reads_box(end, size)` | the same, of a box |
//! | `operates(operations)` | the [`MemOp`](super::MemOp)s in the field read and write memory |
//! | `launches`, `launches_each(launches)`, `launches_graph(exec)` | what the kernels may do to memory: the command is a [`Launch`](super::Launch), or the field has them or a graph of them |
//!
//! A command without a clause about its order goes to the driver at once, and one without a clause about memory leaves
//! all memory alone.

/// A statement about a command. The numbers are places: of words of the parameters, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the table at the module's head says it")]
pub enum Clause {
    InStream(usize),
    WaitsFor(usize),
    RecordsBy(usize),
    Alone(usize),
    AfterEverything,
    AfterContext(usize),
    AtRest,
    EndsContext(usize),
    Renews { context: usize, device: usize },
    Callback,
    Through(usize),
    Writes { address: usize, bytes: usize },
    Reads { address: usize, bytes: usize },
    WritesBox { end: usize, size: usize },
    ReadsBox { end: usize, size: usize },
    Operates(usize),
    Launches,
    LaunchesEach(usize),
    LaunchesGraph(usize),
}

/// A command as it is declared.
#[derive(Clone, Copy, Debug)]
pub struct Declaration {
    /// Its number in the ring.
    pub number: u16,
    /// Its name, which the object log keeps, since numbers may change.
    pub name: &'static str,
    /// What the command does.
    pub clauses: &'static [Clause],
    /// Reads parameters and writes them again.
    pub(super) again: fn(&[u8]) -> Result<Vec<u8>, crate::codec::Malformed>,
    /// Appends parameters of any content.
    #[cfg(test)]
    pub(super) sample: fn(&mut dyn FnMut() -> u64, &mut crate::codec::Writer),
}

/// The structures of parameters.
pub trait Parameters {
    /// The commands that have these parameters.
    const COMMANDS: &'static [u16];

    /// Appends the parameters.
    fn append(&self, w: &mut crate::codec::Writer);
}

/// The place of a field, in words, of fields with these names and sizes. Fails to compile where the field has none.
pub(super) const fn place(fields: &[(&str, Option<usize>)], name: &str) -> usize {
    let (mut at, mut i) = (0, 0);
    while i < fields.len() {
        if same(fields[i].0, name) {
            assert!(at % 8 == 0, "a field that a clause names begins a word");
            return at / 8;
        }
        match fields[i].1 {
            Some(bytes) => at += bytes,
            None => panic!("a field that a clause names has none of any length before it"),
        }
        i += 1;
    }
    panic!("a clause names a field that there is not")
}

const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

macro_rules! clause {
    ($P:ident in_stream $a:ident) => {
        Clause::InStream($P::place(stringify!($a)))
    };
    ($P:ident waits_for $a:ident) => {
        Clause::WaitsFor($P::place(stringify!($a)))
    };
    ($P:ident records_by $a:ident) => {
        Clause::RecordsBy($P::place(stringify!($a)))
    };
    ($P:ident alone $a:ident) => {
        Clause::Alone($P::place(stringify!($a)))
    };
    ($P:ident after_everything) => {
        Clause::AfterEverything
    };
    ($P:ident after_context $a:ident) => {
        Clause::AfterContext($P::place(stringify!($a)))
    };
    ($P:ident at_rest) => {
        Clause::AtRest
    };
    ($P:ident ends_context $a:ident) => {
        Clause::EndsContext($P::place(stringify!($a)))
    };
    ($P:ident renews $a:ident $b:ident) => {
        Clause::Renews { context: $P::place(stringify!($a)), device: $P::place(stringify!($b)) }
    };
    ($P:ident callback) => {
        Clause::Callback
    };
    ($P:ident through $a:ident) => {
        Clause::Through($P::place(stringify!($a)))
    };
    ($P:ident writes $a:ident $b:ident) => {
        Clause::Writes { address: $P::place(stringify!($a)), bytes: $P::place(stringify!($b)) }
    };
    ($P:ident reads $a:ident $b:ident) => {
        Clause::Reads { address: $P::place(stringify!($a)), bytes: $P::place(stringify!($b)) }
    };
    ($P:ident writes_box $a:ident $b:ident) => {
        Clause::WritesBox { end: $P::place(stringify!($a)), size: $P::place(stringify!($b)) }
    };
    ($P:ident reads_box $a:ident $b:ident) => {
        Clause::ReadsBox { end: $P::place(stringify!($a)), size: $P::place(stringify!($b)) }
    };
    ($P:ident operates $a:ident) => {
        Clause::Operates($P::place(stringify!($a)))
    };
    ($P:ident launches) => {
        Clause::Launches
    };
    ($P:ident launches_each $a:ident) => {
        Clause::LaunchesEach($P::place(stringify!($a)))
    };
    ($P:ident launches_graph $a:ident) => {
        Clause::LaunchesGraph($P::place(stringify!($a)))
    };
}

/// How a field lies in the ring: as its type says, unless the declaration says `as`.
macro_rules! layout {
    ($type:ty) => {
        $type
    };
    ($type:ty as $layout:ident) => {
        $layout
    };
}

/// The structure's bytes, and its use as a field of another.
macro_rules! parameters {
    ($P:ident [$life:lifetime] [$($of:lifetime)?] $($field:ident: $type:ty $(as $layout:ident)?),*) => {
        impl<$life> $P$(<$of>)? {
            const FIELDS: &'static [(&'static str, Option<usize>)] =
                &[$((stringify!($field), <layout!($type $(as $layout)?) as Field<$life, $type>>::BYTES)),*];

            /// The place of a field, in words.
            #[allow(dead_code, reason = "not all are named by a clause")]
            const fn place(name: &str) -> usize {
                place(Self::FIELDS, name)
            }
        }

        impl<$life> Field<$life> for $P$(<$of>)? {
            const BYTES: Option<usize> = None;

            #[allow(unused_variables, reason = "some have no fields")]
            fn put(value: &Self, w: &mut Writer) {
                $(<layout!($type $(as $layout)?) as Field<'_, $type>>::put(&value.$field, w);)*
            }

            #[allow(unused_variables, reason = "some have no fields")]
            fn take(r: &mut Reader<$life>) -> Result<Self, Malformed> {
                // Fields are taken in this order.
                Ok(Self { $($field: <layout!($type $(as $layout)?) as Field<$life, $type>>::take(r)?),* })
            }

            #[cfg(test)]
            #[allow(unused_variables, reason = "some have no fields")]
            fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
                $(<layout!($type $(as $layout)?) as Field<'_, $type>>::sample(any, w);)*
            }
        }

        impl<$life> $P$(<$of>)? {
            /// Appends the parameters.
            pub fn write(&self, w: &mut Writer) {
                Self::put(self, w);
            }

            /// Takes what [`Self::write`] appended, and nothing may be behind it.
            ///
            /// # Errors
            /// Where the bytes are not these parameters.
            pub fn read(r: &mut Reader<$life>) -> Result<Self, Malformed> {
                let parameters = Self::take(r)?;
                r.end()?;
                Ok(parameters)
            }
        }
    };
}

/// Reads declarations; the module's head says how they look.
macro_rules! commands {
    ($(
        struct $P:ident $(<$life:lifetime>)? {
            $($(#[$about:meta])* $field:ident: $type:ty $(as $layout:ident)?),* $(,)?
        }
        $($(#[$doc:meta])* $number:literal $NAME:ident
            $(: $($clause:ident $(($($of:ident),*))?),*)?;)+
    )*) => {
        $($($(#[$doc])* pub const $NAME: u16 = FIRST + $number;)+)*

        $(
            #[doc = concat!("Parameters of", $(" [`", stringify!($NAME), "`]",)+ ".")]
            #[derive(Clone, Debug, PartialEq, Eq)]
            #[allow(missing_docs, reason = "the commands say it")]
            pub struct $P $(<$life>)? {
                $($(#[$about])* pub $field: $type,)*
            }

            commands!(@parameters $P [$($life)?] $($field: $type $(as $layout)?),*);

            impl $(<$life>)? Parameters for $P$(<$life>)? {
                const COMMANDS: &'static [u16] = &[$($NAME),+];

                fn append(&self, w: &mut Writer) {
                    self.write(w);
                }
            }
        )*

        /// All commands.
        pub const DECLARED: &[Declaration] = &[$($(Declaration {
            number: $NAME,
            name: stringify!($NAME),
            clauses: &[$($(clause!($P $clause $($($of)*)?)),*)?],
            again: |bytes| {
                let mut w = Writer::new();
                $P::read(&mut Reader::new(bytes))?.write(&mut w);
                Ok(w.into_bytes())
            },
            #[cfg(test)]
            sample: |any, w| <$P as Field>::sample(any, w),
        }),+),*];
    };
    (@parameters $P:ident [] $($fields:tt)*) => { parameters!($P ['a] [] $($fields)*); };
    (@parameters $P:ident [$life:lifetime] $($fields:tt)*) => { parameters!($P [$life] [$life] $($fields)*); };
}

pub(super) use {clause, commands, layout, parameters};
