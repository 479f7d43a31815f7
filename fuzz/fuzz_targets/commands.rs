//! Parameters of any content, taken in any order: the first byte of each eight says what is taken.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::Launch;

fuzz_target!(|data: &[u8]| {
    let mut reader = Reader::new(data);
    if let Ok(launch) = Launch::read(&mut reader) {
        let mut writer = Writer::new();
        launch.write(&mut writer);
        assert_eq!(Launch::read(&mut Reader::new(writer.bytes())), Ok(launch));
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
