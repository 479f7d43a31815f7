//! How GPUs are named: by number, and by UUID as the driver's tools write it.

use crate::attach::Device;

/// `GPU-` and the UUID, as `nvidia-smi -L` and `CUDA_VISIBLE_DEVICES` have it.
pub fn name(uuid: &[u8; 16]) -> String {
    let mut text = "GPU-".to_owned();
    for (i, byte) in uuid.iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The UUID that [`name`] makes this of; none if it is something else.
pub fn uuid(name: &str) -> Option<[u8; 16]> {
    let digits: String = name.strip_prefix("GPU-")?.chars().filter(|it| *it != '-').collect();
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
    let uuid = number.to_be_bytes();
    (self::name(&uuid) == name).then_some(uuid)
}

/// Whether two devices are one GPU, or virtual ones of one GPU: these have the second half of its UUID.
pub fn are_of_one(one: &[u8; 16], other: &[u8; 16]) -> bool {
    one[8..] == other[8..]
}

/// Whether of the pairs, a device that was and the one in its place, those that were virtual ones of one GPU are so again, and no
/// others: the driver places code of virtual GPUs of one GPU at other addresses than that of several.
pub fn are_cut_alike(pairs: &[([u8; 16], [u8; 16])]) -> bool {
    let is_alike = |one: &([u8; 16], [u8; 16])| {
        pairs.iter().all(|other| are_of_one(&one.0, &other.0) == are_of_one(&one.1, &other.1))
    };
    pairs.iter().all(is_alike)
}

/// Which of these devices a word names: a number, or a UUID that may be cut short as long as it is one device's.
pub fn find(word: &str, devices: &[Device]) -> Option<usize> {
    if let Ok(number) = word.parse::<usize>() {
        return (number < devices.len()).then_some(number);
    }
    let wanted = word.strip_prefix("GPU-")?.to_ascii_lowercase();
    let is_it = |device: &Device| name(&device.uuid)["GPU-".len()..].starts_with(&wanted);
    let mut matches = devices.iter().enumerate().filter(|(_, device)| is_it(device));
    let first = matches.next()?.0;
    matches.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices() -> Vec<Device> {
        let device = |first: u8| Device {
            name: String::new(),
            uuid: [first; 16],
            memory: 0,
            pci_bus_id: String::new(),
            attributes: Vec::new(),
            stream_priorities: (0, 0),
            peers: Vec::new(),
            part_of: None,
        };
        [0xa0, 0xa1, 0xb0].map(device).to_vec()
    }

    #[test]
    fn virtual_gpus_of_one_gpu_are_so_again() {
        let part = |number: u8, gpu: u8| std::array::from_fn(|at| if at < 8 { number } else { gpu });
        let (one, other) = (part(1, 1), part(2, 1));
        assert!(are_cut_alike(&[]) && are_cut_alike(&[(one, part(1, 7))]));
        assert!(are_cut_alike(&[(one, part(3, 2)), (other, part(1, 2)), (part(1, 5), part(1, 1))]));
        assert!(!are_cut_alike(&[(one, part(1, 2)), (other, part(1, 3))]), "one GPU became two");
        assert!(!are_cut_alike(&[(part(1, 5), one), (part(1, 6), other)]), "two became one");
    }

    #[test]
    fn a_uuid_is_what_its_name_says() {
        let uuid = *b"rekindle-simgpu\x01";
        assert_eq!(name(&uuid), "GPU-72656b69-6e64-6c65-2d73-696d67707501");
        assert_eq!(super::uuid(&name(&uuid)), Some(uuid));
        for bad in [
            "",
            "GPU-",
            "GPU-72656b69",
            "72656b69-6e64-6c65-2d73-696d67707501",
            "GPU-+2656b69-6e64-6c65-2d73-696d67707501",
        ] {
            assert_eq!(super::uuid(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_word_names_one_device_or_none() {
        let devices = devices();
        assert_eq!(find("2", &devices), Some(2));
        assert_eq!(find("GPU-b", &devices), Some(2));
        assert_eq!(find("GPU-A1a1", &devices), Some(1));
        for none in ["3", "-1", "", "all", "GPU-a", "GPU-c", "b0b0"] {
            assert_eq!(find(none, &devices), None, "{none}");
        }
    }
}
