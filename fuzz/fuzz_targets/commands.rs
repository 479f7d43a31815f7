//! Parameters of any content, read as the parameters of every command, and as fields in any order: the first byte of each
//! eight says which field is read.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle_wire::codec::Reader;
use rekindle_wire::command;

fuzz_target!(|data: &[u8]| {
    for command in command::DECLARED {
        // Writing a value drops the bits that mean nothing.
        if let Some(Ok(once)) = command::again(command.number, data) {
            assert_eq!(command::again(command.number, &once), Some(Ok(once.clone())), "{}", command.name);
        }
    }
    let mut reader = Reader::new(data);
    for how in data.iter().step_by(8) {
        let taken = match how % 4 {
            0 => reader.word().is_ok(),
            1 => reader.word32().is_ok(),
            2 => reader.blob().is_ok_and(|blob| blob.len() <= data.len()),
            _ => reader.text().is_ok(),
        };
        if !taken {
            break;
        }
    }
    let _ = reader.end();
});
