//! Programs of executable graphs: what an executable graph does, step by step, as the worker makes a graph of the
//! driver's of it.
//!
//! ```text
//!   program   count, step...
//!   step      enabled, context, after..., task
//!   task      KERNEL as a launch | COPY end end size | FILL ... | NOTHING | CONDITIONAL condition
//!             | WITHIN place body task, of a step in a body of the conditional step at that place
//! ```

use crate::boxes::End;
use crate::codec::{Malformed, Reader, Writer};
use crate::command::Launch;

/// Most steps of a program.
pub const MAX_STEPS: usize = 1 << 20;

/// The steps of an executable graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// Each comes behind the steps that it comes after.
    pub steps: Vec<Step>,
}

/// A step of an executable graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Where it does nothing instead, this is not set.
    pub enabled: bool,
    /// The context that it runs in.
    pub context: u64,
    /// The places of the steps that it comes after, and what of them (`CUgraphEdgeData`).
    pub after: Vec<(u32, [u8; 8])>,
    /// The place of the conditional step of which it is in a body, and in which.
    pub within: Option<(u32, u32)>,
    /// The work that the step does.
    pub task: Task,
}

/// The work of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// A [`Launch`] as it is written; its stream means nothing.
    Kernel(Vec<u8>),
    /// A copy of a box.
    Copy {
        /// The destination.
        target: End,
        /// The source.
        source: End,
        /// Bytes of a row, rows, slices.
        size: [u64; 3],
    },
    /// A memset.
    Fill {
        /// Of the first byte.
        address: u64,
        /// Bytes from row to row.
        pitch: u64,
        /// The value.
        value: u32,
        /// Bytes of the value: 1, 2 or 4.
        element: u32,
        /// Elements of a row.
        width: u64,
        /// Rows.
        height: u64,
    },
    /// Runs the steps of a body, as its condition says.
    Conditional(Conditional),
    /// Nothing.
    Nothing,
}

/// A conditional step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conditional {
    /// The number of the condition in its graph, from 1 on: the driver's handle.
    pub handle: u64,
    /// `CU_GRAPH_COND_TYPE_*`.
    pub kind: u32,
    /// The bodies.
    pub bodies: u32,
    /// The value that the condition gets at each launch.
    pub default: u32,
    /// Whether it gets that value, `CU_GRAPH_COND_ASSIGN_DEFAULT`.
    pub assigns: bool,
}

const NOTHING: u64 = 0;
const KERNEL: u64 = 1;
const COPY: u64 = 2;
const FILL: u64 = 3;
const CONDITIONAL: u64 = 4;
const WITHIN: u64 = 5;

impl Step {
    /// Appends the step.
    pub fn write(&self, w: &mut Writer) {
        w.word(u64::from(self.enabled));
        w.word(self.context);
        w.word(self.after.len() as u64);
        for (place, data) in &self.after {
            w.word(u64::from(*place));
            w.word(u64::from_le_bytes(*data));
        }
        if let Some((place, body)) = self.within {
            [WITHIN, place.into(), body.into()].into_iter().for_each(|n| w.word(n));
        }
        match &self.task {
            Task::Nothing => w.word(NOTHING),
            Task::Kernel(launch) => {
                w.word(KERNEL);
                w.blob(launch);
            }
            Task::Copy { target, source, size } => {
                w.word(COPY);
                target.write(w);
                source.write(w);
                size.iter().for_each(|n| w.word(*n));
            }
            Task::Conditional(Conditional { handle, kind, bodies, default, assigns }) => {
                let [kind, bodies, default, assigns] = [*kind, *bodies, *default, u32::from(*assigns)].map(u64::from);
                [CONDITIONAL, *handle, kind, bodies, default, assigns].into_iter().for_each(|n| w.word(n));
            }
            Task::Fill { address, pitch, value, element, width, height } => {
                w.word(FILL);
                [*address, *pitch, u64::from(*value), u64::from(*element), *width, *height]
                    .into_iter()
                    .for_each(|n| w.word(n));
            }
        }
    }

    /// Takes what [`Step::write`] appended; `place` is the step's own.
    ///
    /// # Errors
    /// Where it is no step, or one that comes after itself or a later one.
    pub fn read(r: &mut Reader<'_>, place: usize) -> Result<Self, Malformed> {
        let (enabled, context, count) = (r.word()? != 0, r.word()?, r.word()?);
        if place >= MAX_STEPS || count > place as u64 {
            return Err(Malformed("a step of a graph that comes after more than there is"));
        }
        let mut after = Vec::new();
        for _ in 0..count {
            let before = r.word32()?;
            if before as usize >= place {
                return Err(Malformed("a step of a graph that comes after a later one"));
            }
            after.push((before, r.word()?.to_le_bytes()));
        }
        let (mut kind, mut within) = (r.word()?, None);
        if kind == WITHIN {
            let (outer, body) = (r.word32()?, r.word32()?);
            if outer as usize >= place {
                return Err(Malformed("a step of a graph in a body of a later one"));
            }
            within = Some((outer, body));
            kind = r.word()?;
        }
        let task = match kind {
            NOTHING => Task::Nothing,
            KERNEL => {
                let launch = r.blob()?;
                Launch::read(&mut Reader::new(launch))?;
                Task::Kernel(launch.to_vec())
            }
            COPY => {
                let (target, source) = (End::read(r)?, End::read(r)?);
                Task::Copy { target, source, size: [r.word()?, r.word()?, r.word()?] }
            }
            FILL => Task::Fill {
                address: r.word()?,
                pitch: r.word()?,
                value: r.word32()?,
                element: r.word32()?,
                width: r.word()?,
                height: r.word()?,
            },
            CONDITIONAL => Task::Conditional(Conditional {
                handle: r.word()?,
                kind: r.word32()?,
                bodies: r.word32()?,
                default: r.word32()?,
                assigns: r.word()? != 0,
            }),
            _ => return Err(Malformed("a step of a graph that is of no kind")),
        };
        Ok(Self { enabled, context, after, within, task })
    }
}

impl Program {
    /// The program as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.word(self.steps.len() as u64);
        self.steps.iter().for_each(|step| step.write(&mut w));
        w.into_bytes()
    }

    /// Takes what [`Program::to_bytes`] gave.
    ///
    /// # Errors
    /// The bytes are no program.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes);
        let count = r.word()?;
        if count > MAX_STEPS as u64 {
            return Err(Malformed("a graph of more steps than any may have"));
        }
        let mut steps = Vec::new();
        for place in 0..count as usize {
            steps.push(Step::read(&mut r, place)?);
        }
        r.end()?;
        let program = Self { steps };
        program.check_bodies()?;
        Ok(program)
    }

    /// Whether each step in a body is in one that there is, and comes after steps of the same body; and whether each condition has
    /// one step.
    fn check_bodies(&self) -> Result<(), Malformed> {
        for step in &self.steps {
            if let Some((place, body)) = step.within {
                match self.steps.get(place as usize).map(|it| &it.task) {
                    Some(Task::Conditional(outer)) if body < outer.bodies => {}
                    _ => return Err(Malformed("a step of a graph in a body that there is not")),
                }
            }
            let beside = |place: u32| self.steps.get(place as usize).is_some_and(|it| it.within == step.within);
            if !step.after.iter().all(|(place, _)| beside(*place)) {
                return Err(Malformed("a step of a graph that comes after one of another body"));
            }
        }
        let handles: Vec<u64> = self.conditionals().iter().map(|it| it.1.handle).collect();
        if handles.iter().zip(1..).any(|(handle, number)| *handle != number) {
            return Err(Malformed("conditions of a graph that are not numbered from one on"));
        }
        if self.conditionals().iter().any(|it| it.1.bodies == 0 || it.1.bodies as usize > MAX_STEPS) {
            return Err(Malformed("a conditional step without bodies, or with too many"));
        }
        Ok(())
    }

    /// The places of the conditional steps, by the numbers of their conditions.
    #[must_use]
    pub fn conditionals(&self) -> Vec<(usize, Conditional)> {
        let conditional = |(place, step): (usize, &Step)| match step.task {
            Task::Conditional(it) => Some((place, it)),
            _ => None,
        };
        let mut all: Vec<_> = self.steps.iter().enumerate().filter_map(conditional).collect();
        all.sort_by_key(|it| it.1.handle);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn program() -> Program {
        let launch = Launch {
            function: 1,
            grid: [2, 3, 4],
            block: [5, 6, 7],
            shared_bytes: 8,
            flags: 0,
            stream: 0,
            attributes: &[1; 72],
            parameters: b"parameters",
        };
        let mut kernel = Writer::new();
        launch.write(&mut kernel);
        let memory = End::Memory { address: 64, pitch: 8, rows: 2 };
        let array = End::Array { array: 9, at: [1, 2, 3] };
        let fill = Task::Fill { address: 1, pitch: 2, value: 3, element: 4, width: 5, height: 6 };
        let tasks = [
            Task::Kernel(kernel.into_bytes()),
            Task::Copy { target: memory, source: array, size: [4, 2, 1] },
            fill,
            Task::Nothing,
        ];
        let step = |(i, task): (usize, Task)| Step {
            enabled: i != 1,
            context: 7,
            after: (0..i as u32).map(|before| (before, [before as u8; 8])).collect(),
            within: None,
            task,
        };
        Program { steps: tasks.into_iter().enumerate().map(step).collect() }
    }

    /// The same, with a conditional step behind it: a step in each body, and another conditional step in the second.
    fn conditional() -> Program {
        let mut program = program();
        let condition = Conditional { handle: 2, kind: 0, bodies: 2, default: 9, assigns: true };
        let mut add = |within, task| {
            program.steps.push(Step { enabled: true, context: 7, after: Vec::new(), within, task });
        };
        add(None, Task::Conditional(condition));
        add(Some((4, 0)), Task::Nothing);
        add(Some((4, 1)), Task::Conditional(Conditional { handle: 1, kind: 1, bodies: 1, ..condition }));
        add(Some((6, 0)), Task::Nothing);
        add(Some((4, 1)), Task::Nothing);
        program.steps[8].after.push((6, [0; 8]));
        program
    }

    #[test]
    fn conditional_steps_and_their_bodies_read_as_they_were_written() {
        let bytes = conditional().to_bytes();
        let read = Program::from_bytes(&bytes).unwrap();
        assert_eq!(read, conditional());
        assert_eq!(read.conditionals().iter().map(|it| it.0).collect::<Vec<_>>(), [6, 4]);
    }

    #[test]
    fn a_program_whose_bodies_do_not_fit_is_refused() {
        let refused = |change: fn(&mut Program)| {
            let mut program = conditional();
            change(&mut program);
            Program::from_bytes(&program.to_bytes()).is_err()
        };
        assert!(!refused(|_| ()));
        assert!(refused(|it| it.steps[5].within = Some((4, 2))), "no such body");
        assert!(refused(|it| it.steps[5].within = Some((3, 0))), "not a conditional step");
        assert!(refused(|it| it.steps[5].within = Some((5, 0))), "itself");
        assert!(refused(|it| it.steps[7].after.push((5, [0; 8]))), "after a step of another body");
        assert!(refused(|it| it.steps[6].task = Task::Nothing), "a condition without a step");
    }

    #[test]
    fn a_program_reads_as_it_was_written() {
        let bytes = program().to_bytes();
        assert_eq!(Program::from_bytes(&bytes), Ok(program()));
        for end in (0..bytes.len()).step_by(8) {
            assert!(Program::from_bytes(&bytes[..end]).is_err());
        }
    }

    #[test]
    fn a_step_does_not_come_after_itself() {
        let mut bad = program();
        bad.steps[1].after[0].0 = 1;
        assert!(Program::from_bytes(&bad.to_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn hostile_bytes_are_an_error_and_no_panic(at in 0_usize..400, byte in any::<u8>()) {
            let mut bytes = program().to_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = Program::from_bytes(&bytes);
        }
    }
}
