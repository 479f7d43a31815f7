//! Attributes of launches, of kernels and of nodes of graphs.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader};
use rekindle_wire::command::{self, Kind, Launch};

use crate::session::Session;
use crate::session::outcome::Refused;

/// `CU_LAUNCH_ATTRIBUTE_*`.
const COOPERATIVE: u32 = 2;

/// The attributes of a launch as the driver takes them: events by its own handles.
pub(crate) fn attributes(session: &Session, launch: &Launch<'_>) -> Result<Vec<CUlaunchAttribute>, Refused> {
    if !launch.attributes.len().is_multiple_of(command::ATTRIBUTE_BYTES) {
        return Err(Malformed("launch attributes of a broken length").into());
    }
    let mut reader = Reader::new(launch.attributes);
    let mut attributes = Vec::new();
    while reader.end().is_err() {
        let mut attribute = CUlaunchAttribute { id: reader.word32()?, pad: [0; 4], value: [0; 8] };
        for value in &mut attribute.value {
            *value = reader.word()?;
        }
        if command::EVENT_ATTRIBUTES.contains(&attribute.id) {
            attribute.value[0] = session.object(attribute.value[0], &[Kind::Event])?;
        } else if !command::PLAIN_ATTRIBUTES.contains(&attribute.id) {
            return Err(Malformed("a launch attribute that does not travel").into());
        }
        attributes.push(attribute);
    }
    if launch.flags & command::COOPERATIVE != 0 {
        attributes.push(CUlaunchAttribute { id: COOPERATIVE, pad: [0; 4], value: [1, 0, 0, 0, 0, 0, 0, 0] });
    }
    Ok(attributes)
}
