//! Parents that are missing, changed or damaged, and what a worker says of them.

use std::fs;
use std::path::Path;

use rekindle_images::*;

use crate::chain::{Chain, rewrite};
use crate::common::{self, fill, kind, names};

fn refused(chain: &Chain, said: &str) {
    let error = chain.open(2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Parent);
    assert!(error.kind().is_bad_image());
    assert!(error.to_string().contains(said), "{said:?} in: {error}");
    // Its manifest can still be looked at.
    let manifest = Manifest::peek(&ImageDir::open(chain.dir(2)).unwrap()).unwrap();
    assert!(Summary::of(&manifest).to_string().contains("parent      ../1"));
}

#[test]
fn a_parent_that_is_gone_or_another_is_told_wherever_it_is_in_the_chain() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 6] = [
        ("is missing from", |dir| fs::remove_dir_all(dir).unwrap()),
        ("it has no rekindle.img", |dir| {
            for name in names(dir).iter().filter(|name| name.starts_with("rekindle")) {
                fs::remove_file(dir.join(name)).unwrap();
            }
        }),
        ("is not committed", |dir| fs::remove_file(dir.join(COMMIT)).unwrap()),
        ("rekindle-data-0.raw is missing", |dir| fs::remove_file(dir.join(data_name(0))).unwrap()),
        ("and 00000000000000000000000000000001 was built on", |dir| rewrite(dir, [77; 16])),
        ("has been changed or written again", |dir| rewrite(dir, [1; 16])),
    ];
    for (said, damage) in damages {
        let chain = Chain::new();
        chain.add(1, b"counter1");
        chain.add(2, b"counter2");
        // The parent of all has another id.
        if !said.contains("0001") && !said.contains("again") {
            damage(&chain.dir(0));
            refused(&chain, said);
            continue;
        }
        damage(&chain.dir(1));
        refused(
            &chain,
            &said.replace("00000000000000000000000000000001", &CheckpointId::from_bytes([1; 16]).to_string()),
        );
    }
}

#[test]
fn damage_in_a_parent_is_found_and_named() {
    let chain = Chain::new();
    chain.add(1, b"counter1");
    let data = chain.dir(0).join(data_name(0));
    let mut bytes = fs::read(&data).unwrap();
    bytes[3] ^= 1;
    fs::write(&data, bytes).unwrap();
    let report = chain.open(1).unwrap().verify(|_| ());
    assert_eq!(report.problem_count, 1);
    assert_eq!(report.problems[0].file, "rekindle-data-0.raw of its parent");
}

#[test]
fn what_a_worker_says_of_a_parent_is_compared_with_it() {
    type Lie = fn(&mut Manifest);
    fn first(manifest: &mut Manifest) -> &mut Piece {
        &mut manifest.clients[0].allocations[0].pieces[0]
    }
    fn extent(piece: &mut Piece) -> (&mut u32, &mut Extent) {
        match &mut piece.storage {
            Storage::Parent { depth, extent } => (depth, extent),
            other => panic!("{other:?}"),
        }
    }
    let lies: [(&str, Lie); 7] = [
        ("another's piece", |m| *first(m) = m.clients[1].allocations[0].pieces[0]),
        ("another hash", |m| first(m).hash = PieceHash::from_bytes([1; 16])),
        ("another place", |m| extent(first(m)).1.offset = 4096),
        ("another file", |m| extent(first(m)).1.file = 1),
        ("no file", |m| extent(first(m)).1.file = 1000),
        ("too deep", |m| *extent(first(m)).0 = 2),
        ("not deep", |m| *extent(first(m)).0 = 0),
    ];
    for (what, lie) in lies {
        let chain = Chain::new();
        let writer = chain.begin(1);
        let mut manifest = fill(&writer).unwrap();
        lie(&mut manifest);
        assert_eq!(kind(writer.commit(manifest)), ErrorKind::Invalid, "{what}");
        assert_eq!(names(&chain.dir(1)), ["parent"]);
    }
}

#[test]
fn without_a_base_nothing_can_be_said_to_be_in_a_parent() {
    let chain = Chain::new();
    chain.add(1, b"counter!");
    let manifest = chain.open(1).unwrap().manifest().clone();
    let dir = tempfile::tempdir().unwrap();
    let writer = common::create(dir.path()).unwrap();
    assert_eq!(kind(writer.commit(manifest)), ErrorKind::Invalid);
}

#[test]
fn an_image_is_not_committed_on_a_parent_that_is_not_as_it_was() {
    type Change = fn(&Chain);
    let changes: [(&str, Change); 5] = [
        ("is missing from", |chain| fs::rename(chain.dir(1), chain.dir(100)).unwrap()),
        ("is not committed", |chain| fs::remove_file(chain.dir(1).join(COMMIT)).unwrap()),
        ("rekindle-data-1.raw is missing", |chain| fs::remove_file(chain.dir(0).join(data_name(1))).unwrap()),
        ("was built on", |chain| {
            fs::rename(chain.dir(1), chain.dir(100)).unwrap();
            fs::create_dir(chain.dir(1)).unwrap();
            common::write(&chain.dir(1));
        }),
        ("has been changed or written again", |chain| {
            // As where there are no locks.
            flatten(&chain.open(1).unwrap(), {
                fs::create_dir(chain.dir(100)).unwrap();
                ImageDir::open(chain.dir(100)).unwrap()
            })
            .unwrap();
            fs::rename(chain.dir(1), chain.dir(101)).unwrap();
            fs::rename(chain.dir(100), chain.dir(1)).unwrap();
        }),
    ];
    for (said, change) in changes {
        let chain = Chain::new();
        chain.add(1, b"counter1");
        let writer = chain.begin(2);
        let manifest = common::fill_with(&writer, b"counter2").unwrap();
        change(&chain);
        let error = writer.commit(manifest).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Parent, "{said}: {error}");
        assert!(error.to_string().contains(said), "{said:?} in: {error}");
        assert_eq!(names(&chain.dir(2)), ["parent"]);
    }
}
