//! The collective operations of a warp's lanes: shuffles, votes, matches, reductions.
//!
//! Each instruction names the lanes that take part. They need not arrive together: inputs are kept until all of those lanes
//! have arrived, possibly in several fragments.

use crate::exec::machine::{Collective, Core, Inst, LANES, Lanes, NO_ROW, Reduction};

/// The inputs that the lanes of a warp have brought.
#[derive(Debug, Clone)]
pub(crate) struct Inputs {
    /// The lanes each lane waits for.
    members: [u32; LANES],
    values: [u64; LANES],
    /// Second and third operands of shuffles; the predicate of votes is bit 0 of the value.
    second: [u32; LANES],
    third: [u32; LANES],
}

impl Default for Inputs {
    fn default() -> Self {
        Inputs { members: [0; LANES], values: [0; LANES], second: [0; LANES], third: [0; LANES] }
    }
}

impl Inputs {
    /// Takes the active lanes' inputs.
    pub(crate) fn take(&mut self, w: &Core<'_>, i: &Inst, collective: Collective) {
        let members = i.imm as u32;
        for lane in Lanes(w.active) {
            self.members[lane] = w.get(members, lane);
            match collective {
                Collective::Sync | Collective::Elect => {}
                Collective::ShuffleUp | Collective::ShuffleDown | Collective::ShuffleXor | Collective::ShuffleIndex => {
                    self.values[lane] = u64::from(w.get::<u32>(i.a, lane));
                    self.second[lane] = w.get(i.b, lane);
                    self.third[lane] = w.get(i.c, lane);
                }
                Collective::VoteAll | Collective::VoteAny | Collective::VoteUniform | Collective::Ballot => {
                    // `b` is what the predicate is exclusive-ored with.
                    let predicate = w.predicate(i.a) ^ w.predicate(i.b);
                    self.values[lane] = u64::from(predicate >> lane & 1);
                }
                Collective::MatchAny(true) | Collective::MatchAll(true) => {
                    self.values[lane] = w.get(i.a, lane);
                }
                Collective::MatchAny(false) | Collective::MatchAll(false) | Collective::Reduce(_) => {
                    self.values[lane] = u64::from(w.get::<u32>(i.a, lane));
                }
            }
        }
    }

    /// The lanes that are present together with all of their members. No lane waits for a lane that has ended.
    pub(crate) fn ready(&self, mut present: u32, live: u32) -> u32 {
        loop {
            let ready = Lanes(present)
                .filter(|&lane| self.members[lane] & live & !present == 0)
                .fold(0, |mask, lane| mask | 1 << lane);
            if ready == present {
                return ready;
            }
            present = ready;
        }
    }

    /// Gives the active lanes their results. `present` are all lanes that take part.
    pub(crate) fn finish(&self, w: &mut Core<'_>, i: &Inst, collective: Collective, present: u32) {
        match collective {
            Collective::Sync => {}
            Collective::ShuffleUp | Collective::ShuffleDown | Collective::ShuffleXor | Collective::ShuffleIndex => {
                self.shuffle(w, i, collective, present)
            }
            Collective::VoteAll | Collective::VoteAny | Collective::VoteUniform => {
                let mut result = 0;
                for lane in Lanes(w.active) {
                    let members = self.members[lane] & present;
                    let yes = self.voters(members);
                    let holds = match collective {
                        Collective::VoteAll => yes == members,
                        Collective::VoteAny => yes != 0,
                        _ => yes == members || yes == 0,
                    };
                    result |= u32::from(holds) << lane;
                }
                w.set_predicate(i.d, result);
            }
            Collective::Ballot => {
                for lane in Lanes(w.active) {
                    w.put(i.d, lane, self.voters(self.members[lane] & present));
                }
            }
            Collective::MatchAny(_) => {
                for lane in Lanes(w.active) {
                    let same = self.same(lane, self.members[lane] & present);
                    w.put(i.d, lane, same);
                }
            }
            Collective::MatchAll(_) => {
                let mut all = 0;
                for lane in Lanes(w.active) {
                    let members = self.members[lane] & present;
                    let holds = self.same(lane, members) == members;
                    all |= u32::from(holds) << lane;
                    w.put(i.d, lane, if holds { members } else { 0 });
                }
                if i.e != NO_ROW {
                    w.set_predicate(i.e, all);
                }
            }
            Collective::Reduce(reduction) => {
                for lane in Lanes(w.active) {
                    w.put(i.d, lane, self.reduce(reduction, self.members[lane] & present));
                }
            }
            Collective::Elect => {
                let mut elected = 0;
                for lane in Lanes(w.active) {
                    let leader = (self.members[lane] & present).trailing_zeros();
                    elected |= u32::from(leader == lane as u32) << lane;
                    if i.d != NO_ROW {
                        w.put(i.d, lane, leader);
                    }
                }
                if i.e != NO_ROW {
                    w.set_predicate(i.e, elected);
                }
            }
        }
    }

    fn voters(&self, members: u32) -> u32 {
        Lanes(members).fold(0, |mask, lane| mask | ((self.values[lane] as u32 & 1) << lane))
    }

    fn same(&self, lane: usize, members: u32) -> u32 {
        Lanes(members).filter(|&other| self.values[other] == self.values[lane]).fold(0, |mask, other| mask | 1 << other)
    }

    fn reduce(&self, reduction: Reduction, members: u32) -> u32 {
        let values = Lanes(members).map(|lane| self.values[lane] as u32);
        let signed = Lanes(members).map(|lane| self.values[lane] as i32);
        match reduction {
            Reduction::Add => values.fold(0, u32::wrapping_add),
            Reduction::MinSigned => signed.fold(i32::MAX, i32::min).cast_unsigned(),
            Reduction::MaxSigned => signed.fold(i32::MIN, i32::max).cast_unsigned(),
            Reduction::MinUnsigned => values.fold(u32::MAX, u32::min),
            Reduction::MaxUnsigned => values.fold(0, u32::max),
            Reduction::And => values.fold(u32::MAX, |a, b| a & b),
            Reduction::Or => values.fold(0, |a, b| a | b),
            Reduction::Xor => values.fold(0, |a, b| a ^ b),
        }
    }

    fn shuffle(&self, w: &mut Core<'_>, i: &Inst, collective: Collective, present: u32) {
        let mut within = 0;
        for lane in Lanes(w.active) {
            let at = lane as u32;
            let by = self.second[lane] & 31;
            let clamp = self.third[lane] & 31;
            let segment = self.third[lane] >> 8 & 31;
            let last = at & segment | clamp & !segment;
            let first = at & segment;
            let (source, ok) = match collective {
                Collective::ShuffleUp => {
                    let source = at.cast_signed() - by.cast_signed();
                    // For this mode the clamp is the lowest lane.
                    (source.cast_unsigned(), source >= last.cast_signed())
                }
                Collective::ShuffleDown => (at + by, at + by <= last),
                Collective::ShuffleXor => (at ^ by, at ^ by <= last),
                _ => {
                    let source = first | by & !segment;
                    (source, source <= last)
                }
            };
            let source = if ok { source } else { at };
            within |= u32::from(ok) << lane;
            // A lane that does not take part has no value. The hardware's result is undefined; this implementation's is the
            // lane's own value.
            let from = if present >> source & 1 != 0 { source as usize } else { lane };
            w.put(i.d, lane, self.values[from] as u32);
        }
        if i.e != NO_ROW {
            w.set_predicate(i.e, within);
        }
    }
}
