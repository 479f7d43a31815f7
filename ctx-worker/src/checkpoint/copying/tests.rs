use super::*;
use crate::resources::memory::BackgroundCopy;
use rekindle_images::Storage;

const MIB: u64 = 1 << 20;
const BASE: u64 = 0x2000_0000_0000;

/// Jobs of 1 MiB each: three of an allocation, one of another, and one of a piece.
pub(crate) fn tasks(preservation: Preservation) -> Vec<Task> {
    let task = |place, address, offset| Task {
        job: Job { address: address + offset, offset, length: MIB, device: 0, context: 0, array: None },
        place,
        preservation,
        soon: u32::MAX,
        expected: None,
        before: None,
    };
    let first = (0..3).map(|i| task(Place::Allocation(BASE), BASE, i * MIB));
    let more = [task(Place::Allocation(BASE + 8 * MIB), BASE + 8 * MIB, 0), task(Place::Piece(7), 0x1600, 0)];
    first.chain(more).collect()
}

fn piece(offset: u64) -> Piece {
    Piece { offset, length: MIB, hash: PieceHash::from_bytes([1; 16]), storage: Storage::Zero }
}

fn copy(copying: &Copying, taken: &Taken) {
    copying.is_read(taken);
    copying.is_written(taken, piece(taken.job.offset));
}

#[test]
fn everything_is_copied_once_and_closed_jobs_come_first() {
    let mut tasks = tasks(Preservation::Protected);
    tasks[4].preservation = Preservation::Closed;
    tasks[1].preservation = Preservation::AlreadyStored(piece(MIB));
    let copying = Copying::new(tasks, None, false);
    assert!(!copying.may_open());
    let mut order = Vec::new();
    while let Some(taken) = copying.take() {
        order.push(taken.index);
        copy(&copying, &taken);
        assert!(copying.may_open());
    }
    assert_eq!(order, [4, 0, 2, 3]);
    assert_eq!((copying.copied(), copying.bytes), (5 * MIB, 5 * MIB));
    assert_eq!(copying.pieces().unwrap().len(), 5);
    assert!(copying.stop().is_none() && !copying.is_over());
    copying.end();
    assert!(copying.is_over());
}

#[test]
fn nothing_gets_onto_the_link_before_what_keeps_the_ring_closed() {
    let mut tasks = tasks(Preservation::Protected);
    (tasks[2].preservation, tasks[4].preservation) = (Preservation::Closed, Preservation::Closed);
    let copying = Copying::new(tasks, None, false);
    let closed = [copying.take().unwrap(), copying.take().unwrap()];
    assert_eq!(closed.map(|it| it.index), [2, 4]);
    let (takes, taken) = std::sync::mpsc::channel();
    let other = Arc::clone(&copying);
    std::thread::spawn(move || takes.send(other.take().map(|it| (it.index, other.may_open()))));
    copy(&copying, &closed[1]);
    taken.recv_timeout(Duration::from_millis(50)).unwrap_err();
    copy(&copying, &closed[0]);
    assert_eq!(taken.recv_timeout(Duration::from_secs(20)), Ok(Some((0, true))));
    // Once a copy is given up, lanes do not wait for that.
    let mut tasks = self::tasks(Preservation::Protected);
    tasks[4].preservation = Preservation::Closed;
    let copying = Copying::new(tasks, None, false);
    copying.take().unwrap();
    let (takes, taken) = std::sync::mpsc::channel();
    let other = Arc::clone(&copying);
    std::thread::spawn(move || takes.send(other.take().map(|it| it.index)));
    taken.recv_timeout(Duration::from_millis(50)).unwrap_err();
    copying.fail();
    assert_eq!(taken.recv_timeout(Duration::from_secs(20)), Ok(None));
}

#[test]
fn what_may_be_written_soon_comes_first_but_for_what_keeps_the_ring_closed() {
    let mut tasks = tasks(Preservation::Protected);
    (tasks[3].soon, tasks[1].soon) = (0, 1);
    tasks[4].preservation = Preservation::Closed;
    let copying = Copying::new(tasks, None, false);
    let order: Vec<_> = std::iter::from_fn(|| copying.take().inspect(|it| copy(&copying, it))).collect();
    assert_eq!(order.iter().map(|it| it.index).collect::<Vec<_>>(), [4, 3, 1, 0, 2]);
}

#[test]
fn lanes_that_rest_are_woken_when_a_command_waits_and_when_there_is_nothing_left() {
    let copying = Copying::new(tasks(Preservation::Protected), None, true);
    std::thread::scope(|scope| {
        let resting = scope.spawn(|| copying.wait_until_awaited());
        copying.lock().urgent.push_back(2);
        copying.awaited.notify_all();
        assert!(resting.join().unwrap());
        let all: Vec<_> = std::iter::from_fn(|| copying.take()).collect();
        assert_eq!((all.len(), all[0].index, all[0].urgent), (5, 2, true));
        let resting = scope.spawn(|| copying.wait_until_awaited());
        all.iter().for_each(|taken| copy(&copying, taken));
        assert!(!resting.join().unwrap());
    });
    let copying = Copying::new(tasks(Preservation::Protected), None, false);
    std::thread::scope(|scope| {
        let resting = scope.spawn(|| copying.wait_until_awaited());
        copying.fail();
        assert!(!resting.join().unwrap());
    });
    assert!(!copying.wait_until_awaited());
}

#[test]
fn a_lane_that_has_left_the_last_piece_on_the_stage_does_not_rest() {
    let copying = Copying::new(tasks(Preservation::Protected), None, false);
    let all: Vec<_> = std::iter::from_fn(|| copying.take()).collect();
    // The other lanes have ended: there is nothing to take or to write.
    all[1..].iter().for_each(|taken| copy(&copying, taken));
    copying.is_read(&all[0]);
    let (said, hears) = std::sync::mpsc::channel();
    let resting = Arc::clone(&copying);
    std::thread::spawn(move || said.send(resting.wait_until_awaited()));
    assert_eq!(hears.recv_timeout(Duration::from_secs(20)), Ok(false));
}

#[test]
fn what_is_given_up_is_no_mispredicted_write_whatever_a_lane_finds_then() {
    let copying = Copying::new(tasks(Preservation::Protected), None, false);
    let all: Vec<_> = std::iter::from_fn(|| copying.take()).collect();
    copying.is_read(&all[0]);
    copying.fail();
    copying.is_wrong(&all[0]);
    assert!(copying.wrong().is_none() && copying.wrong_places().is_empty() && !copying.is_in_vain());
    // A change that was found earlier is still reported.
    let copying = Copying::new(tasks(Preservation::Protected), None, false);
    let taken = copying.take().unwrap();
    copying.is_wrong(&taken);
    copying.fail();
    assert_eq!(copying.wrong(), Some((BASE, 3 * MIB)));
}

#[test]
fn the_ring_may_open_as_soon_as_what_it_would_change_is_on_the_host() {
    let copying = Copying::new(tasks(Preservation::Closed), None, false);
    let all: Vec<_> = std::iter::from_fn(|| copying.take()).collect();
    for taken in &all {
        assert!(!copying.may_open());
        copying.is_read(taken);
    }
    assert!(copying.may_open() && copying.copied() == 0);
    all.iter().for_each(|taken| copying.is_written(taken, piece(taken.job.offset)));
    assert!(copying.may_open() && copying.pieces().is_ok());
}

#[test]
fn what_a_lane_could_not_copy_is_in_no_image() {
    let copying = Copying::new(tasks(Preservation::Protected), None, false);
    let taken = copying.take().unwrap();
    copying.is_read(&taken);
    copying.fail();
    assert!(copying.take().is_none() && copying.pieces().is_err());
    copying.stop();
    copying.end();
    // Frees do not wait for the job any more.
    copying.let_go(BASE, BASE + MIB);
    copying.wait_until_over_for(Duration::from_secs(60));
}

#[test]
fn who_waits_for_the_end_of_a_copy_does_so_for_a_while_only() {
    let copying = Copying::new(tasks(Preservation::Protected), None, false);
    assert!(!copying.wait_until_over_for(Duration::from_millis(1)));
    let ends = Arc::clone(&copying);
    let waiting = std::thread::spawn(move || copying.wait_until_over_for(Duration::from_secs(60)));
    ends.stop();
    ends.end();
    assert!(waiting.join().unwrap());
}

#[test]
fn whoever_unmaps_memory_waits_for_its_copy_alone_and_it_is_next() {
    let copying = Copying::new(tasks(Preservation::Protected), None, false);
    let first = copying.take().unwrap();
    let unmapping = {
        let copying = Arc::clone(&copying);
        std::thread::spawn(move || copying.let_go(BASE + 8 * MIB, BASE + 9 * MIB))
    };
    while copying.lock().urgent.is_empty() {
        std::thread::yield_now();
    }
    let next = copying.take().unwrap();
    assert_eq!((first.index, next.index), (0, 3));
    assert!(!unmapping.is_finished());
    copying.is_read(&next);
    unmapping.join().unwrap();
    // A free of an address without jobs does not wait.
    copying.let_go(BASE + 100 * MIB, BASE + 200 * MIB);
}

#[test]
fn a_precopy_leaves_out_what_goes_away() {
    let copying = Copying::new(tasks(Preservation::None), None, true);
    copying.let_go(BASE, BASE + 3 * MIB);
    let mut order = Vec::new();
    while let Some(taken) = copying.take() {
        order.push(taken.index);
        copy(&copying, &taken);
    }
    assert_eq!(order, [3, 4]);
    let places: Vec<_> = copying.copied_pieces().iter().map(|(place, _, _)| *place).collect();
    assert_eq!(places, [Place::Allocation(BASE + 8 * MIB), Place::Piece(7)]);
}

#[test]
fn clones_are_copied_from_their_place_and_give_it_back() {
    let mut room = Clones::imagined(8 * MIB);
    let mut tasks = tasks(Preservation::Protected);
    let clone = room.take(0, MIB).unwrap();
    tasks[0].preservation = Preservation::Cloned(clone);
    let copying = Copying::new(tasks, Some(room), false);
    let taken: Vec<_> = std::iter::from_fn(|| {
        let taken = copying.take()?;
        copy(&copying, &taken);
        Some((taken.index, taken.job.address))
    })
    .collect();
    // Jobs that a command may have to wait for come before jobs that are safe already.
    assert_eq!(taken.last(), Some(&(0, clone)));
    assert_eq!(copying.lock().room.as_mut().unwrap().take(0, 8 * MIB), Some(clone));
}

#[test]
fn what_is_wrong_in_one_place_does_not_keep_others_from_being_looked_at() {
    let copying = Copying::new(tasks(Preservation::Protected), None, false);
    while let Some(taken) = copying.take() {
        copying.is_read(&taken);
        if [1, 3].contains(&taken.index) {
            copying.is_wrong(&taken);
        } else {
            copying.is_passed(&taken);
        }
    }
    let places: Vec<_> = copying.wrong_places().into_iter().collect();
    assert_eq!(places, [Place::Allocation(BASE), Place::Allocation(BASE + 8 * MIB)]);
    assert_eq!(copying.wrong(), Some((BASE, 3 * MIB)));
    assert!(copying.is_in_vain() && copying.pieces().is_err());
}

#[test]
fn a_copy_stops_only_when_no_clone_is_being_made() {
    let copying = Copying::new(tasks(Preservation::Protected), Some(Clones::imagined(8 * MIB)), false);
    copying.lock().states[2] = State::Cloning;
    copying.fail();
    let stopping = {
        let copying = Arc::clone(&copying);
        std::thread::spawn(move || copying.stop().is_some())
    };
    assert!(!copying.wait_unless_failed());
    let mut inner = copying.lock();
    assert!(inner.room.is_some());
    copying.make_safe(&mut inner, 2, State::Cloned(1));
    drop(inner);
    copying.changed.notify_all();
    assert!(stopping.join().unwrap());
}

#[test]
fn a_copy_that_is_cancelled_before_it_begins_does_not_begin() {
    let cancel = Cancel::default();
    cancel.expect_another();
    cancel.fire();
    let copying = Copying::new(tasks(Preservation::Protected), None, false);
    cancel.begun(&copying);
    assert!(copying.take().is_none());
    // The next copy belongs to another request.
    cancel.expect_another();
    let copying = Copying::new(tasks(Preservation::Protected), None, false);
    cancel.begun(&copying);
    assert!(copying.take().is_some());
    cancel.fire();
    assert!(copying.take().is_none());
}

#[test]
fn a_lane_that_hangs_in_a_write_holds_up_nobody_once_the_copy_is_given_up() {
    let copying = Copying::new(tasks(Preservation::Protected), None, false);
    let hangs = copying.take().unwrap();
    copying.is_read(&hangs);
    // The job is never written.
    copying.fail();
    copying.wait_until_quiet();
    copying.let_go(BASE, BASE + 9 * MIB);
    assert!(!copying.wait_unless_failed() && !copying.is_over());
    assert!(copying.take().is_none() && copying.pieces().is_err());
}

#[test]
fn a_reset_waits_for_a_lane_that_reads_a_clone_though_its_copy_was_given_up() {
    let mut tasks = tasks(Preservation::Protected);
    tasks.truncate(1);
    tasks[0].preservation = Preservation::Cloned(rekindle_wire::window::clones(0).start);
    let copying = Copying::new(tasks, Some(Clones::imagined(8 << 20)), false);
    let taken = copying.take().unwrap();
    copying.fail();
    let (says, quiet) = std::sync::mpsc::channel();
    let waiting = Arc::clone(&copying);
    std::thread::spawn(move || {
        waiting.wait_until_quiet();
        says.send(())
    });
    quiet.recv_timeout(Duration::from_millis(100)).unwrap_err();
    copying.is_read(&taken);
    assert_eq!(quiet.recv_timeout(Duration::from_secs(60)), Ok(()));
}
