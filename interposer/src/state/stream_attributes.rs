//! The attributes that were set on streams, each as long as its stream exists.

use std::collections::HashMap;
use std::sync::Mutex;

use rekindle_cuda_abi::types::*;

/// `CUstreamAttrValue`.
pub(crate) type Value = [u64; 8];

/// A stream, by what it goes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Named {
    /// A stream that the application created, by its handle.
    Made(CUstream),
    /// The legacy default stream of a context.
    Legacy,
    /// The default stream of a thread in a context, by the thread's number.
    Thread(u32),
}

/// The values that were set on a stream, by attribute.
type Set = HashMap<u32, Value>;

/// The attributes of all streams, by context and stream.
#[derive(Default)]
pub(crate) struct StreamAttributes(Mutex<HashMap<(CUcontext, Named), Set>>);

impl StreamAttributes {
    fn change<T>(&self, change: impl FnOnce(&mut HashMap<(CUcontext, Named), Set>) -> T) -> Result<T, CUresult> {
        self.0.lock().map_err(|_| CUDA_ERROR_UNKNOWN).map(|mut all| change(&mut all))
    }

    /// The value of an attribute; `None` if it was not set.
    pub(crate) fn get(&self, stream: (CUcontext, Named), attribute: u32) -> Result<Option<Value>, CUresult> {
        self.change(|all| all.get(&stream)?.get(&attribute).copied())
    }

    pub(crate) fn set(&self, stream: (CUcontext, Named), attribute: u32, value: Value) -> Result<(), CUresult> {
        self.change(|all| {
            all.entry(stream).or_default().insert(attribute, value);
        })
    }

    /// Gives a stream the attributes of another, and no others.
    pub(crate) fn copy(&self, to: (CUcontext, Named), from: (CUcontext, Named)) -> Result<(), CUresult> {
        self.change(|all| {
            match all.get(&from).cloned() {
                Some(set) => all.insert(to, set),
                None => all.remove(&to),
            };
        })
    }

    /// Forgets a stream that was destroyed.
    pub(crate) fn forget_stream(&self, stream: CUstream) {
        let _ = self.change(|all| all.retain(|(_, named), _| *named != Named::Made(stream)));
    }

    /// Forgets the default streams of a thread that has ended.
    pub(crate) fn forget_thread(&self, thread: u32) {
        let _ = self.change(|all| all.retain(|(_, named), _| *named != Named::Thread(thread)));
    }

    /// Forgets the streams of a context that is gone.
    pub(crate) fn forget_context(&self, context: CUcontext) {
        let _ = self.change(|all| all.retain(|(of, _), _| *of != context));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_forgotten_with_their_stream_thread_and_context() {
        let all = StreamAttributes::default();
        let left = || all.0.lock().unwrap().len();
        let value = [7; 8];
        for context in 1..=2 {
            for named in [Named::Made(context * 10), Named::Legacy, Named::Thread(1), Named::Thread(2)] {
                all.set((context, named), 3, value).unwrap();
            }
        }
        assert_eq!(left(), 8);
        all.forget_stream(10);
        assert_eq!(all.get((1, Named::Made(10)), 3), Ok(None));
        all.forget_thread(1);
        assert_eq!((left(), all.get((1, Named::Thread(2)), 3)), (5, Ok(Some(value))));
        all.forget_context(1);
        assert_eq!((left(), all.get((1, Named::Legacy), 3)), (3, Ok(None)));
        assert_eq!(all.get((2, Named::Legacy), 3), Ok(Some(value)));
    }

    #[test]
    fn a_copy_replaces_all_attributes_also_by_none() {
        let all = StreamAttributes::default();
        let [from, to, empty] = [10, 20, 30].map(|stream| (1, Named::Made(stream)));
        all.set(from, 1, [1; 8]).unwrap();
        all.set(to, 2, [2; 8]).unwrap();
        all.copy(to, from).unwrap();
        assert_eq!((all.get(to, 1), all.get(to, 2)), (Ok(Some([1; 8])), Ok(None)));
        all.copy(to, empty).unwrap();
        assert_eq!(all.get(to, 1), Ok(None));
        assert_eq!(all.0.lock().unwrap().len(), 1);
    }
}
