//! Tests of holders with a model of a driver that places code in the first free room that fits, or in the smallest: in blocks
//! of each context, and a new block in the first free room between all blocks.

use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;

use super::*;

const WINDOW: u64 = 0x1000_0000_0000;
const LOWEST: Habit = Habit { unit: 512, smallest: false };

struct Block {
    context: u64,
    size: u64,
    used: BTreeMap<u64, u64>,
}

/// The model of the driver.
#[derive(Default)]
struct Model {
    blocks: BTreeMap<u64, Block>,
    next: u64,
    holders: HashMap<u64, u64>,
    contexts: BTreeSet<u64>,
    rule: Rule,
}

/// The room that the driver chooses among those in a context's blocks.
#[derive(Clone, Copy, Debug, Default)]
enum Rule {
    /// Like the software GPU.
    #[default]
    Lowest,
    /// Like NVIDIA's driver, as observed on an H200.
    Smallest,
}

impl Rule {
    fn unit(self) -> u64 {
        match self {
            Self::Lowest => 512,
            Self::Smallest => 256,
        }
    }
}

impl Model {
    /// Free room between taken ranges, up to `end`.
    fn rooms<'a>(taken: impl Iterator<Item = (&'a u64, u64)>, end: u64) -> Vec<Range<u64>> {
        let mut at = 0;
        let mut rooms = Vec::new();
        for (start, length) in taken {
            rooms.push(at..*start);
            at = start + length;
        }
        rooms.push(at..end);
        rooms
    }

    fn allocate(&mut self, context: u64, size: u64) -> u64 {
        let size = size.max(1).next_multiple_of(self.rule.unit());
        let large = size >= BLOCK / 2;
        let size = if large { size.next_multiple_of(BLOCK) } else { size };
        let own = self.blocks.iter().filter(|(_, block)| block.context == context && !large);
        let rooms = own.flat_map(|(start, block)| {
            let rooms = Self::rooms(block.used.iter().map(|(at, size)| (at, *size)), block.size);
            rooms.into_iter().map(move |room| (*start, room))
        });
        let mut rooms = rooms.filter(|(_, room)| room.end - room.start >= size);
        let room = match self.rule {
            Rule::Lowest => rooms.next(),
            Rule::Smallest => rooms.min_by_key(|(start, room)| (room.end - room.start, start + room.start)),
        };
        let (start, at) = room.map(|(start, room)| (start, room.start)).unwrap_or_else(|| {
            let length = if large { size } else { BLOCK };
            let gaps = Self::rooms(self.blocks.iter().map(|(at, block)| (at, block.size)), u64::MAX);
            let start = gaps.into_iter().find(|gap| gap.end - gap.start >= length).unwrap().start;
            let owner = if large { 0 } else { context };
            self.blocks.insert(start, Block { context: owner, size: length, used: BTreeMap::new() });
            (start, 0)
        });
        self.blocks.get_mut(&start).unwrap().used.insert(at, size);
        WINDOW + start + at
    }

    fn free(&mut self, address: u64) {
        let at = address - WINDOW;
        let (&start, block) = self.blocks.range_mut(..=at).next_back().unwrap();
        block.used.remove(&(at - start)).expect("it is allocated");
        if block.used.is_empty() {
            self.blocks.remove(&start);
        }
    }
}

impl Placer for Model {
    fn place(&mut self, context: u64, size: u64) -> Result<Taken, NotLoaded> {
        let address = self.allocate(context, size);
        self.next += 1;
        self.holders.insert(self.next, address);
        Ok(Taken { code: self.next, address })
    }

    fn contexts(&self) -> Vec<(u64, u64)> {
        self.contexts.iter().map(|context| (*context, 0)).collect()
    }

    fn remove(&mut self, _: u64, code: u64) -> Result<(), NotLoaded> {
        let address = self.holders.remove(&code).unwrap();
        self.free(address);
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Context,
    /// Loads a module in one of the contexts: variables of these sizes.
    Load(usize, Vec<u64>, u64),
    /// Uses the function of one of the modules: its code, of that size, is placed.
    Use(usize),
    Unload(usize),
    EndContext(usize),
}

/// A module that a history loaded.
#[derive(Clone, Debug)]
struct Module {
    context: u64,
    sizes: Vec<u64>,
    code_size: u64,
    variables: Vec<u64>,
    code: Option<u64>,
    loaded_at: usize,
    dead: bool,
}

/// The steps that succeeded, by the numbers of modules and contexts.
#[derive(Clone, Debug)]
enum Record {
    Context(u64),
    Load(usize),
    Use(usize),
    Unload(usize),
    EndContext(u64),
}

#[derive(Default)]
struct History {
    model: Model,
    modules: Vec<Module>,
    /// Contexts, each with the step at which it began and whether it still exists.
    contexts: Vec<(u64, usize, bool)>,
    log: Vec<Record>,
}

impl History {
    fn of(rule: Rule) -> Self {
        Self { model: Model { rule, ..Model::default() }, ..Self::default() }
    }

    fn execute(&mut self, record: Record) {
        let model = &mut self.model;
        match record {
            Record::Context(context) => drop(model.contexts.insert(context)),
            Record::Load(number) => {
                let module = &mut self.modules[number];
                module.variables = module.sizes.iter().map(|size| model.allocate(module.context, *size)).collect();
            }
            Record::Use(number) => {
                let module = &mut self.modules[number];
                module.code = Some(model.allocate(module.context, module.code_size));
            }
            Record::Unload(number) => {
                let module = &mut self.modules[number];
                module.variables.drain(..).chain(module.code.take()).for_each(|address| model.free(address));
            }
            Record::EndContext(context) => {
                model.contexts.remove(&context);
                for module in self.modules.iter_mut().filter(|it| it.context == context) {
                    module.variables.drain(..).chain(module.code.take()).for_each(|address| model.free(address));
                }
            }
        }
    }

    fn step(&mut self, step: &Step) {
        let pick = |of: Vec<usize>, at: usize| (!of.is_empty()).then(|| of[at % of.len()]);
        let contexts = |it: &Self| (0..it.contexts.len()).filter(|i| it.contexts[*i].2).collect::<Vec<_>>();
        let modules = |it: &Self| (0..it.modules.len()).filter(|i| !it.modules[*i].dead).collect::<Vec<_>>();
        let at = self.log.len();
        let record = match step {
            Step::Context => {
                let context = self.contexts.len() as u64 + 1;
                self.contexts.push((context, at, true));
                Some(Record::Context(context))
            }
            Step::Load(which, sizes, code_size) => pick(contexts(self), *which).map(|context| {
                let (context, ..) = self.contexts[context];
                self.modules.push(Module {
                    context,
                    sizes: sizes.clone(),
                    code_size: *code_size,
                    variables: Vec::new(),
                    code: None,
                    loaded_at: at,
                    dead: false,
                });
                Record::Load(self.modules.len() - 1)
            }),
            Step::Use(which) => {
                pick(modules(self), *which).filter(|module| self.modules[*module].code.is_none()).map(Record::Use)
            }
            Step::Unload(which) => pick(modules(self), *which).map(|module| {
                self.modules[module].dead = true;
                Record::Unload(module)
            }),
            Step::EndContext(which) => pick(contexts(self), *which).map(|place| {
                self.contexts[place].2 = false;
                let (context, ..) = self.contexts[place];
                self.modules.iter_mut().filter(|it| it.context == context).for_each(|it| it.dead = true);
                Record::EndContext(context)
            }),
        };
        if let Some(record) = record {
            self.log.push(record.clone());
            self.execute(record);
        }
    }

    /// Replays the history, from a log without the lives that began behind the cut and are over.
    fn again(&self, cut: usize) -> Result<Self, NotLoaded> {
        let began = |context: u64| self.contexts.iter().find(|it| it.0 == context).map_or(0, |it| it.1);
        let ended = |context: u64| self.contexts.iter().any(|it| it.0 == context && !it.2);
        let context_gone = |context: u64| ended(context) && began(context) >= cut;
        let gone = |number: usize| {
            let module = &self.modules[number];
            (module.dead && module.loaded_at >= cut) || context_gone(module.context)
        };
        let mut again = Self { modules: self.modules.clone(), ..Self::of(self.model.rule) };
        again.modules.iter_mut().for_each(|it| (it.variables, it.code) = (Vec::new(), None));
        self.log[..cut].iter().for_each(|record| again.execute(record.clone()));
        let behind = |it: &&Module| !it.dead && it.loaded_at >= cut;
        let wanted = self.modules.iter().enumerate().filter(|(_, it)| behind(it)).flat_map(|(number, it)| {
            let places = it.variables.iter().zip(&it.sizes);
            places.map(move |(address, size)| ((number as u64, it.context), (*address, *size)))
        });
        for record in &self.log[cut..] {
            if let Record::Context(context) = record
                && !context_gone(*context)
            {
                again.execute(record.clone());
            }
        }
        let context = again.model.contexts.first().copied().unwrap_or_default();
        let habit = measure(&mut again.model, context)?;
        assert_eq!(habit.unit, self.model.rule.unit());
        let mut holders = Holders::new(habit, wanted)?;
        holders.fill(&mut again.model)?;
        for record in &self.log[cut..] {
            match *record {
                Record::Context(_) => {}
                Record::Load(number) | Record::Use(number) | Record::Unload(number) if gone(number) => {}
                Record::EndContext(context) if context_gone(context) => {}
                Record::Load(number) => {
                    holders.make_room(&mut again.model, number as u64, self.modules[number].context)?;
                    again.execute(record.clone());
                }
                Record::Use(_) => again.execute(record.clone()),
                Record::Unload(_) | Record::EndContext(_) => {
                    if let Record::EndContext(context) = record {
                        holders.leave(&mut again.model, *context)?;
                    }
                    again.execute(record.clone());
                    holders.fill(&mut again.model)?;
                }
            }
        }
        holders.end(&mut again.model)?;
        assert!(again.model.holders.is_empty());
        Ok(again)
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let size = prop_oneof![6 => 1..3000_u64, 3 => 1..300_000_u64, 1 => 500_000..5_000_000_u64];
    let sizes = proptest::collection::vec(size, 1..2);
    let step = prop_oneof![
        1 => Just(Step::Context),
        10 => (any::<usize>(), sizes, 1..40_000_u64).prop_map(|(at, sizes, code)| Step::Load(at, sizes, code)),
        6 => any::<usize>().prop_map(Step::Use),
        8 => any::<usize>().prop_map(Step::Unload),
        1 => any::<usize>().prop_map(Step::EndContext),
    ];
    proptest::collection::vec(step, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn variables_lie_where_they_lay_wherever_the_log_was_cut(
        steps in steps(),
        cut in any::<prop::sample::Index>(),
        rule in prop_oneof![Just(Rule::Lowest), Just(Rule::Smallest)],
    ) {
        let mut history = History::of(rule);
        history.step(&Step::Context);
        steps.iter().for_each(|step| history.step(step));
        let again = history.again(cut.index(history.log.len() + 1)).map_err(|why| TestCaseError::fail(why.to_string()))?;
        for (before, after) in history.modules.iter().zip(&again.modules).filter(|(it, _)| !it.dead) {
            prop_assert_eq!(&before.variables, &after.variables);
        }
    }
}

#[test]
fn a_driver_that_places_code_otherwise_is_noticed() {
    struct Elsewhere(Model);
    impl Placer for Elsewhere {
        fn place(&mut self, context: u64, size: u64) -> Result<Taken, NotLoaded> {
            // Other code takes the first unit.
            let other = self.0.allocate(context, LEAST);
            let taken = self.0.place(context, size);
            self.0.free(other);
            taken
        }

        fn contexts(&self) -> Vec<(u64, u64)> {
            self.0.contexts()
        }

        fn remove(&mut self, context: u64, code: u64) -> Result<(), NotLoaded> {
            self.0.remove(context, code)
        }
    }
    let mut driver = Elsewhere(Model::default());
    let mut holders = Holders::new(LOWEST, [((1, 1), (WINDOW, 100)), ((2, 1), (WINDOW + 4096, 100))]).unwrap();
    holders.fill(&mut driver).unwrap();
    assert!(matches!(holders.make_room(&mut driver, 1, 1), Err(NotLoaded::NotHeld { address: WINDOW })));
}

#[test]
fn holders_are_bounded() {
    let mut driver = Model::default();
    let mut holders = Holders::new(LOWEST, [((1, 1), (WINDOW + (1 << 40), 100))]).unwrap();
    holders.fill(&mut driver).unwrap();
    assert!(holders.bytes <= MOST_USELESS as u64 * BLOCK);
    assert!(matches!(holders.make_room(&mut driver, 1, 1), Err(NotLoaded::NotHeld { .. })));
    holders.end(&mut driver).unwrap();
    assert!(driver.holders.is_empty());
    assert!(Holders::new(LOWEST, [((1, 1), (u64::MAX, 100))]).is_err());
}

#[test]
fn a_drivers_habit_is_found_out() {
    let of = |rule| measure(&mut Model { rule, ..Model::default() }, 1).unwrap();
    assert_eq!(of(Rule::Lowest), LOWEST);
    assert_eq!(of(Rule::Smallest), Habit { unit: 256, smallest: true });
}

#[test]
fn rooms_are_widened_so_that_each_variable_of_a_module_finds_its_own() {
    let mut driver = Model { rule: Rule::Smallest, ..Model::default() };
    let habit = measure(&mut driver, 1).unwrap();
    // Places observed on an H200: the first above the second, and two in a row before one above.
    for offsets in [&[0xb400, 0x500][..], &[0x300, 0x400, 0x3800], &[0x4200, 0x1000, 0x1100]] {
        let addresses: Vec<u64> = offsets.iter().map(|offset| WINDOW + offset).collect();
        let mut holders = Holders::new(habit, addresses.iter().map(|address| ((1, 1), (*address, 4)))).unwrap();
        holders.fill(&mut driver).unwrap();
        holders.make_room(&mut driver, 1, 1).unwrap();
        let placed: Vec<u64> = addresses.iter().map(|_| driver.allocate(1, 4)).collect();
        assert_eq!(placed, addresses);
        placed.into_iter().for_each(|address| driver.free(address));
        holders.end(&mut driver).unwrap();
    }
}
