//! Which GPUs a container's list names.

use rekindle_wire::attach::Device;
use rekindle_wire::control::{Failing, FailureKind};
use rekindle_wire::gpus;
use thiserror::Error;

use super::container::Uuid;

/// The name that stands for all GPUs.
const ALL: &str = "all";

/// Why a list is not valid.
#[derive(Debug, Error)]
pub(crate) enum SelectError {
    #[error("there is no GPU {name:?} here, only {}: `rekindle doctor` and `nvidia-smi -L` list them", numbers(*.count))]
    Unknown { name: String, count: usize },
    #[error("no GPU is named: use all, or a comma-separated list of numbers or UUIDs")]
    Nothing,
}

impl Failing for SelectError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Unknown { .. } | Self::Nothing => FailureKind::Refused,
        }
    }
}

fn numbers(count: usize) -> String {
    match count {
        0 => "none".to_owned(),
        1 => "0".to_owned(),
        _ => format!("0 to {}", count - 1),
    }
}

/// The GPUs that the list names, in the order of `devices`; none for all of them.
pub(super) fn select(names: &[String], devices: &[Device]) -> Result<Option<Vec<Uuid>>, SelectError> {
    if names.is_empty() {
        return Err(SelectError::Nothing);
    }
    let mut wanted = vec![false; devices.len()];
    for name in names {
        if name == ALL {
            return Ok(None);
        }
        let found = gpus::find(name, devices).and_then(|at| wanted.get_mut(at));
        let unknown = || SelectError::Unknown { name: name.chars().take(64).collect(), count: devices.len() };
        *found.ok_or_else(unknown)? = true;
    }
    let chosen = devices.iter().zip(wanted).filter(|(_, wanted)| *wanted);
    Ok(Some(chosen.map(|(device, _)| device.uuid).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_named_by_number_uuid_or_all_together() {
        let device = |last: u8| Device {
            name: String::new(),
            uuid: [last; 16],
            memory: 0,
            pci_bus_id: String::new(),
            attributes: Vec::new(),
            stream_priorities: (0, 0),
            peers: Vec::new(),
            part_of: None,
        };
        let devices = [1, 2, 3].map(device);
        let chosen = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|it| (*it).to_owned()).collect();
            select(&names, &devices).map(|it| it.map(|it| it.iter().map(|uuid| uuid[0]).collect::<Vec<_>>()))
        };
        assert_eq!(chosen(&["2", "0", "2"]).unwrap(), Some(vec![1, 3]));
        assert_eq!(chosen(&["GPU-0202"]).unwrap(), Some(vec![2]));
        assert_eq!(chosen(&["0", "all"]).unwrap(), None);
        assert!(matches!(chosen(&[]), Err(SelectError::Nothing)));
        let error = chosen(&["0", "3"]).unwrap_err().to_string();
        assert!(error.contains("no GPU \"3\"") && error.contains("0 to 2"), "{error}");
    }
}
