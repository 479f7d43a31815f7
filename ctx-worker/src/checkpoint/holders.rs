//! Place holders: variables that keep room for code that a restore has yet to load.
//!
//! The driver places code in the first free room that fits, in blocks that it makes for each context. If the log lacks unloaded
//! code (`session/lives.rs`), a replay finds room free that was taken at the time, and would place code there. So variables
//! without use, the place holders, take all room below the highest wanted address. When code is about to be loaded, the holders
//! make room for that code only:
//!
//! ```text
//!   at first     ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒        ▒ holders, placed by the driver from the lowest free room on
//!   make_room    ▒▒▒▒▒▒▒▒▒░░░░░░▒▒▒▒▒▒▒▒▒▒░░▒▒▒▒▒▒▒▒        ░ free: the places of this code's variables
//!   loaded       ▒▒▒▒▒▒▒▒▒AAAAAA▒▒▒▒▒▒▒▒▒▒BB▒▒▒▒▒▒▒▒
//!   end                   AAAAAA          BB
//! ```
//!
//! In the log's own order this leads to the same addresses. Among all places that were free and large enough, the driver chose
//! the lowest or the smallest. Now the driver chooses by the same rule among fewer places, which include that place. Code that
//! is not wanted at any address (code of functions, and code that is unloaded later) finds room in new blocks.
//!
//! Contexts take room from each other in larger blocks. So the room below the lowest wanted address is taken first, in the
//! context that wants that address, then the room up to the next wanted address, and so on. The remaining room below the
//! highest wanted address lies in blocks of other contexts. Holders take this room too, so that code that may lie anywhere does
//! not keep a block from becoming free; and when something is unloaded, holders leave the blocks in which another context wants
//! room.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::resources::not_loaded::NotLoaded;

/// The smallest holder. Places of code are multiples of this, or of more ([`Habit`]).
const LEAST: u64 = 256;
/// The number of holders that show how far apart places are.
const MEASURED: usize = 64;
/// The largest holder.
const LARGEST: u64 = 512 << 10;
/// The size of the blocks that the driver allocates for code. A variable of half a block or more has blocks of its own.
const BLOCK: u64 = 2 << 20;
/// The most holders.
const MOST: usize = 65_536;
/// The maximum number of times that a room is widened.
const WIDENINGS: usize = 32;
/// The maximum number of blocks held that contain no wanted place: they lie below the blocks that contain wanted places.
const MOST_USELESS: usize = 128;
/// The most bytes of holders: device memory that the client does not have.
const MOST_BYTES: u64 = 512 << 20;

/// Places and removes holders: the worker, or a model in tests.
pub(crate) trait Placer {
    /// Places a variable of this many bytes in a context.
    fn place(&mut self, context: u64, size: u64) -> Result<Taken, NotLoaded>;

    /// The contexts that exist, each with its device.
    fn contexts(&self) -> Vec<(u64, u64)>;

    /// Removes code that was placed in a context.
    fn remove(&mut self, context: u64, code: u64) -> Result<(), NotLoaded>;
}

/// A variable without use, and where it was placed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// The module that contains the variable.
    pub(crate) code: u64,
    pub(crate) address: u64,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    context: u64,
    size: u64,
    code: u64,
}

/// Code that has its variables in a context: (module or library, context).
type Code = (u64, u64);

/// How the driver places code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Habit {
    /// Places are multiples of this.
    unit: u64,
    /// The driver chooses the smallest room that fits, instead of the lowest.
    smallest: bool,
}

/// Finds out how the driver places code.
pub(crate) fn measure(placer: &mut impl Placer, context: u64) -> Result<Habit, NotLoaded> {
    let mut taken = (0..MEASURED).map(|_| placer.place(context, LEAST)).collect::<Result<Vec<_>, _>>()?;
    taken.sort_unstable_by_key(|it| it.address);
    let least = taken.windows(2).map(|pair| pair[1].address - pair[0].address).min().unwrap_or(LEAST);
    // Other results mean a driver that places code in another way, which shows when room is made.
    let unit = least.clamp(LEAST, LARGEST).next_power_of_two();
    let is_row = |row: &[Taken]| row.windows(2).all(|pair| pair[1].address - pair[0].address == unit);
    let mut smallest = false;
    if let Some(row) = taken.windows(6).position(is_row) {
        // A room of two units, and behind it a room of a single unit.
        for gone in [row + 4, row + 2, row + 1] {
            placer.remove(context, taken.remove(gone).code)?;
        }
        let again = placer.place(context, LEAST)?;
        smallest = taken.get(row).is_some_and(|first| again.address == first.address + 4 * unit);
        taken.push(again);
    }
    taken.into_iter().try_for_each(|it| placer.remove(context, it.code))?;
    Ok(Habit { unit, smallest })
}

/// The holders of a restore, and the places for which they keep room.
#[derive(Default)]
pub(crate) struct Holders {
    unit: u64,
    smallest: bool,
    /// Where code that is not loaded yet had its variables.
    wanted: BTreeMap<Code, Vec<Range<u64>>>,
    /// The same places, in the order in which the driver fills them.
    ordered: BTreeMap<Code, Vec<Range<u64>>>,
    /// Holders by address.
    held: BTreeMap<u64, Held>,
    bytes: u64,
    useless: usize,
}

impl Holders {
    /// Holders for code with variables at these addresses and of these sizes.
    pub(crate) fn new(
        Habit { unit, smallest }: Habit,
        variables: impl IntoIterator<Item = (Code, (u64, u64))>,
    ) -> Result<Self, NotLoaded> {
        let mut wanted: BTreeMap<Code, Vec<Range<u64>>> = BTreeMap::new();
        for (code, (address, size)) in variables {
            let place =
                place_of(unit, address, size).ok_or(NotLoaded::Image("a variable lies outside of all memory"))?;
            wanted.entry(code).or_default().push(place);
        }
        let ordered = wanted.clone();
        wanted.values_mut().for_each(merge);
        Ok(Self { unit, smallest, wanted, ordered, ..Self::default() })
    }

    /// Takes all wanted room, and all room that the driver might choose instead. Called again whenever room may have become
    /// free.
    pub(crate) fn fill(&mut self, placer: &mut impl Placer) -> Result<(), NotLoaded> {
        let wanting = self.wanting();
        let in_the_way = |at: u64, held: &Held| {
            wanting.get(&(at / BLOCK)).is_some_and(|contexts| contexts.iter().any(|context| *context != held.context))
        };
        self.let_go(placer, in_the_way)?;
        let of_code = |(&(_, context), places): (&Code, &Vec<Range<u64>>)| {
            places.iter().map(|place| (place.end, context)).collect::<Vec<_>>()
        };
        let mut ends: Vec<(u64, u64)> = self.wanted.iter().flat_map(of_code).collect();
        ends.sort_unstable();
        for (at, &(end, context)) in ends.iter().enumerate() {
            // The room below the next end of the same context includes this one.
            if ends.get(at + 1).is_none_or(|next| next.1 != context) {
                self.fill_up_to(placer, context, end)?;
            }
        }
        let devices: HashMap<u64, u64> = placer.contexts().into_iter().collect();
        for (context, device) in &devices {
            let on_device = ends.iter().filter(|(_, wanting)| devices.get(wanting) == Some(device));
            if let Some((end, _)) = on_device.max() {
                self.fill_up_to(placer, *context, *end)?;
            }
        }
        Ok(())
    }

    /// The contexts that want room in each block.
    fn wanting(&self) -> HashMap<u64, Vec<u64>> {
        let mut blocks: HashMap<u64, Vec<u64>> = HashMap::new();
        for ((_, context), places) in &self.wanted {
            for place in places {
                for block in place.start / BLOCK..place.end.div_ceil(BLOCK) {
                    blocks.entry(block).or_default().push(*context);
                }
            }
        }
        blocks
    }

    /// Takes the room in a context's own blocks, and new blocks for the places that the context wants below `end`. The driver
    /// makes a new block only where nothing fits into the context's own blocks.
    fn fill_up_to(&mut self, placer: &mut impl Placer, context: u64, end: u64) -> Result<(), NotLoaded> {
        let mut size = LARGEST;
        while size >= self.unit {
            let taken = placer.place(context, size)?;
            if !is_in_new_block(placer, context, taken)? || self.is_useful(context, taken.address..end) {
                self.keep(taken, Held { context, size, code: taken.code })?;
            } else {
                placer.remove(context, taken.code)?;
                size /= 2;
            }
        }
        Ok(())
    }

    /// Whether to keep a new block at the beginning of this range: yes, as long as a place that the context wants in the range
    /// is not held, or would itself get a new block. [`MOST_USELESS`] limits such blocks without a wanted place.
    fn is_useful(&mut self, context: u64, range: Range<u64>) -> bool {
        let of_context = self.wanted.iter().filter(|((_, wanting), _)| *wanting == context);
        let mut ahead =
            of_context.flat_map(|(_, places)| places).filter(|it| range.start < it.end && it.end <= range.end);
        if !ahead.any(|place| has_blocks(place) || self.holders_of(context, place).is_none()) {
            return false;
        }
        let block = range.start..range.start.saturating_add(BLOCK);
        if !self.wanted.values().flatten().any(|place| place.start < block.end && block.start < place.end) {
            self.useless += 1;
        }
        self.useless <= MOST_USELESS
    }

    /// The holders that together cover a place.
    fn holders_of(&self, context: u64, place: &Range<u64>) -> Option<Vec<(u64, Held)>> {
        let mut holders = Vec::new();
        let mut covered = place.start;
        while covered < place.end {
            let (at, held) = self.held.range(..=covered).next_back()?;
            if held.context != context || at + held.size <= covered {
                return None;
            }
            holders.push((*at, *held));
            covered = at + held.size;
        }
        Some(holders)
    }

    fn keep(&mut self, taken: Taken, held: Held) -> Result<(), NotLoaded> {
        self.held.insert(taken.address, held);
        self.bytes += held.size;
        if self.held.len() > MOST || self.bytes > MOST_BYTES {
            return Err(NotLoaded::TooManyHolders { holders: self.held.len(), bytes: self.bytes });
        }
        Ok(())
    }

    fn let_go(&mut self, placer: &mut impl Placer, which: impl Fn(u64, &Held) -> bool) -> Result<(), NotLoaded> {
        let (gone, left) = std::mem::take(&mut self.held).into_iter().partition(|(at, held)| which(*at, held));
        self.held = left;
        self.bytes = self.held.values().map(|held| held.size).sum();
        let gone: BTreeMap<u64, Held> = gone;
        gone.values().try_for_each(|held| placer.remove(held.context, held.code))
    }

    /// Called before this code is loaded in this context: holders leave the places of its variables, and no other place.
    pub(crate) fn make_room(&mut self, placer: &mut impl Placer, code: u64, context: u64) -> Result<(), NotLoaded> {
        let Some(end) = self.wanted.get(&(code, context)).and_then(|places| places.last()).map(|place| place.end)
        else {
            return Ok(());
        };
        // Code that was placed since may lie in a new block, with free room.
        self.fill_up_to(placer, context, end)?;
        let mut places = self.wanted.remove(&(code, context)).unwrap_or_default();
        let ordered = self.ordered.remove(&(code, context)).unwrap_or_default();
        if let Some(wider) = self.widened(context, &places, &ordered) {
            places = wider;
        }
        let mut giving = BTreeMap::new();
        for place in &places {
            giving.extend(self.holders_of(context, place).ok_or(NotLoaded::NotHeld { address: place.start })?);
        }
        // Temporary holders, which take the places until all room around them is taken again.
        let mut keepers = Vec::new();
        for (at, held) in giving {
            self.held.remove(&at);
            self.bytes -= held.size;
            placer.remove(context, held.code)?;
            let end = at + held.size;
            let mut from = at;
            for place in places.iter().filter(|place| place.start < end && at < place.end) {
                let hole = place.start.max(at)..place.end.min(end);
                self.place_between(placer, context, from..hole.start, None)?;
                from = hole.end;
                self.place_between(placer, context, hole, Some(&mut keepers))?;
            }
            self.place_between(placer, context, from..end, None)?;
        }
        keepers.into_iter().try_for_each(|keeper| placer.remove(context, keeper.code))
    }

    /// Rooms that are wider than the wanted places, so that a driver which chooses the smallest room chooses each in its turn.
    /// The rest of a room is filled again before the next code is loaded.
    fn widened(&self, context: u64, places: &[Range<u64>], ordered: &[Range<u64>]) -> Option<Vec<Range<u64>>> {
        let mut rooms = places.to_vec();
        for _ in 0..WIDENINGS {
            let Some((wrong, size)) = wrong_room(&rooms, ordered).filter(|_| self.smallest) else {
                return (rooms != places).then_some(rooms);
            };
            let room = rooms.get_mut(wrong)?;
            let more = room.end..room.start + size + self.unit;
            self.holders_of(context, &more)?;
            room.end = more.end;
            if rooms.windows(2).any(|pair| pair[1].start <= pair[0].end) {
                return None;
            }
        }
        None
    }

    /// Fills a range, which is the only free room, with holders. With `keepers` they are temporary, and added there.
    fn place_between(
        &mut self,
        placer: &mut impl Placer,
        context: u64,
        range: Range<u64>,
        mut keepers: Option<&mut Vec<Taken>>,
    ) -> Result<(), NotLoaded> {
        let mut at = range.start;
        while at < range.end {
            let left = (range.end - at) / self.unit;
            let size = (self.unit << left.ilog2()).min(LARGEST);
            let taken = placer.place(context, size)?;
            if taken.address != at {
                placer.remove(context, taken.code)?;
                return Err(NotLoaded::NotHeld { address: at });
            }
            match &mut keepers {
                Some(keepers) => keepers.push(taken),
                None => self.keep(taken, Held { context, size, code: taken.code })?,
            }
            at += size;
        }
        Ok(())
    }

    /// Called before a context is destroyed, and its holders with it.
    pub(crate) fn leave(&mut self, placer: &mut impl Placer, context: u64) -> Result<(), NotLoaded> {
        self.let_go(placer, |_, held| held.context == context)
    }

    /// Removes all holders.
    pub(crate) fn end(&mut self, placer: &mut impl Placer) -> Result<(), NotLoaded> {
        self.let_go(placer, |_, _| true)
    }
}

/// The room that a driver which chooses the smallest would choose before its turn, if any, and the size of the room that it
/// should choose.
fn wrong_room(rooms: &[Range<u64>], ordered: &[Range<u64>]) -> Option<(usize, u64)> {
    // Two places may share a unit: then the driver fills both at once.
    let mut left: Vec<Range<u64>> = rooms.to_vec();
    for place in ordered {
        let Some(right) = left.iter().position(|room| room.start == place.start && room.end >= place.end) else {
            continue;
        };
        let size = |room: &Range<u64>| room.end - room.start;
        let fits = left.iter().enumerate().filter(|(_, room)| size(room) >= size(place));
        let chosen = fits.min_by_key(|(_, room)| (size(room), room.start)).map(|(at, _)| at);
        if chosen != Some(right) {
            return chosen.map(|chosen| (chosen, size(&left[right])));
        }
        left[right].start = place.end;
    }
    None
}

/// Whether the driver made a block for the variable just placed: then the block contains nothing else. If less than [`LARGEST`]
/// was placed, no older block has room for it.
fn is_in_new_block(placer: &mut impl Placer, context: u64, placed: Taken) -> Result<bool, NotLoaded> {
    if !placed.address.is_multiple_of(BLOCK) {
        return Ok(false);
    }
    let probes = (1..BLOCK / LARGEST).map(|_| placer.place(context, LARGEST)).collect::<Result<Vec<_>, _>>()?;
    probes.iter().try_for_each(|probe| placer.remove(context, probe.code))?;
    Ok(probes.iter().all(|probe| probe.address / BLOCK == placed.address / BLOCK))
}

/// The room that the driver takes for a variable. A large variable has whole blocks.
fn place_of(unit: u64, address: u64, size: u64) -> Option<Range<u64>> {
    let start = address / unit * unit;
    let end = address.checked_add(size)?.checked_next_multiple_of(unit)?;
    let place = start..end;
    Some(start..if has_blocks(&place) { end.checked_next_multiple_of(BLOCK)? } else { end })
}

/// Whether a variable is so large that it has blocks of its own.
fn has_blocks(place: &Range<u64>) -> bool {
    place.start.is_multiple_of(BLOCK) && place.end - place.start >= BLOCK / 2
}

/// Joins places that touch.
fn merge(places: &mut Vec<Range<u64>>) {
    places.sort_unstable_by_key(|place| (place.start, place.end));
    places.dedup_by(|next, before| {
        let touches = next.start <= before.end;
        if touches {
            before.end = before.end.max(next.end);
        }
        touches
    });
}

#[cfg(test)]
mod tests;
