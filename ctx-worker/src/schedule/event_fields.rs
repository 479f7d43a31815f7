//! The fields of a command that name events. Any other word of its parameters belongs to the client: a number, an address or a
//! kernel parameter, which may equal an event's handle by chance or by intent.

use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{ATTRIBUTE_BYTES, EVENT_ATTRIBUTES, Launch};

use crate::schedule::dependencies::Shapes;
use crate::session::outcome::Refused;

/// Replaces the event `from` by the event `to` wherever a command names it. All other bytes stay the same, and so does the
/// length.
pub(crate) fn rename(shapes: &Shapes, call: u16, parameters: &mut Vec<u8>, from: u64, to: u64) -> Result<(), Refused> {
    let mut word = |at: usize| {
        let field = parameters.get_mut(at * 8..at * 8 + 8).filter(|field| **field == from.to_le_bytes());
        field.into_iter().for_each(|field| field.copy_from_slice(&to.to_le_bytes()));
    };
    shapes.events(call).for_each(&mut word);
    if shapes.has_attributes(call) {
        let launch = Launch::read(&mut Reader::new(parameters))?;
        let mut attributes = launch.attributes.to_vec();
        for attribute in attributes.chunks_exact_mut(ATTRIBUTE_BYTES) {
            let (id, value) = attribute.split_at_mut(8);
            let names_event = EVENT_ATTRIBUTES.iter().any(|event| *id == u64::from(*event).to_le_bytes());
            if names_event && value.starts_with(&from.to_le_bytes()) {
                value[..8].copy_from_slice(&to.to_le_bytes());
            }
        }
        let mut renamed = Writer::new();
        Launch { attributes: &attributes, ..launch }.write(&mut renamed);
        *parameters = renamed.into_bytes();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::dependencies::EventUse;
    use crate::serve::fixture;
    use rekindle_cuda_abi::table;
    use rekindle_wire::command::{self, Kind};
    use rekindle_wire::ring::CommandHeader;

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn attribute(id: u32, value: [u64; 8]) -> Vec<u8> {
        let mut bytes = words(&[u64::from(id)]);
        bytes.extend(words(&value));
        assert_eq!(bytes.len(), ATTRIBUTE_BYTES);
        bytes
    }

    #[test]
    fn a_launch_keeps_what_its_kernel_takes_where_that_equals_the_event() {
        let (from, to, other) = (Kind::Event.handle(7), Kind::Event.handle(1 << 47 | 1), Kind::Event.handle(8));
        const COOPERATIVE: u32 = 2;
        let event = EVENT_ATTRIBUTES[0];
        let launch = |named: u64| {
            let mut attributes = attribute(COOPERATIVE, [from; 8]);
            attributes.extend(attribute(event, [named, from, 0, 0, 0, 0, 0, 0]));
            attributes.extend(attribute(event, [other, 0, 0, 0, 0, 0, 0, 0]));
            // The last parameter is shorter than a word.
            let mut parameters = words(&[from, 1, from]);
            parameters.extend([1, 2, 3]);
            let mut bytes = Writer::new();
            let launch = Launch {
                function: from,
                grid: [1, 2, 3],
                block: [4, 5, 6],
                shared_bytes: 7,
                flags: 0,
                stream: from,
                attributes: &attributes,
                parameters: &parameters,
            };
            launch.write(&mut bytes);
            bytes.into_bytes()
        };
        let mut bytes = launch(from);
        rename(&Shapes::new(&[]), command::LAUNCH, &mut bytes, from, to).unwrap();
        assert_eq!(bytes, launch(to));
    }

    #[test]
    fn a_command_that_waits_for_an_event_has_it_renamed_and_a_graph_that_equals_it_keeps_its_name() {
        let (from, to) = (Kind::Event.handle(7), Kind::Event.handle(1 << 47 | 1));
        let shapes = Shapes::new(&[]);
        let renamed = |call| {
            let mut bytes = words(&[from, from]);
            rename(&shapes, call, &mut bytes, from, to).unwrap();
            bytes
        };
        assert_eq!(renamed(command::EVENT_SYNC), words(&[to, from]));
        for call in [command::GRAPH_LAUNCH, command::COPY, command::STREAM_SYNC, command::MEM_FREE] {
            assert_eq!(renamed(call), words(&[from, from]));
        }
    }

    #[test]
    fn a_line_of_the_table_has_its_events_renamed_and_no_other_word() {
        let table = table::parse(table::TEXT).unwrap();
        let shapes = Shapes::new(&table);
        let (from, to) = (Kind::Event.handle(7), Kind::Event.handle(1 << 47 | 1));
        let mut named = 0;
        for (call, line) in table.iter().enumerate().filter(|(_, line)| line.route.travels()) {
            let params: Vec<_> = line.params.iter().flatten().take_while(|p| p.c_type != "const char *").collect();
            let mut bytes = words(&vec![from; params.len()]);
            rename(&shapes, call as u16, &mut bytes, from, to).unwrap();
            let expected: Vec<u64> = params.iter().map(|p| if p.c_type == "CUevent" { to } else { from }).collect();
            assert_eq!(bytes, words(&expected), "{}", line.symbol);
            named += expected.iter().filter(|word| **word == to).count();
        }
        assert!(named >= 5, "{named}");
    }

    #[test]
    fn an_event_that_is_set_aside_leaves_equal_parameters_of_a_deferred_launch_alone() {
        let mut worker = fixture::executor();
        let (context, event) = (fixture::context(&mut worker), Kind::Event.handle(7));
        fixture::event(&mut worker, context, event);
        let mut bytes = Writer::new();
        let attributes = attribute(EVENT_ATTRIBUTES[0], [event, 0, 0, 0, 0, 0, 0, 0]);
        let launch = Launch {
            function: Kind::Function.handle(9),
            grid: [1; 3],
            block: [1; 3],
            shared_bytes: 0,
            flags: 0,
            stream: 1,
            attributes: &attributes,
            parameters: &event.to_le_bytes(),
        };
        launch.write(&mut bytes);
        let header = CommandHeader { call: command::LAUNCH, context, ..Default::default() };
        let dependencies = worker.scheduler.dependencies(&worker.call.session, &worker.memory, &header, bytes.bytes());
        assert_eq!(dependencies.events, [(event, EventUse::Record)]);
        worker.scheduler.deferred.restore(fixture::entry(1, header, bytes.into_bytes(), dependencies));
        let call = &mut worker.call;
        worker.scheduler.set_event_aside(call, &worker.memory, event).unwrap();

        // The command that destroys the event is deferred behind, and has the next number.
        let aside = Kind::Event.handle(1 << 47 | (worker.scheduler.deferred.next - 1));
        let entry = worker.scheduler.deferred.entry(1).unwrap();
        let launch = Launch::read(&mut Reader::new(&entry.parameters)).unwrap();
        assert_eq!(launch.parameters, event.to_le_bytes());
        assert_eq!(launch.events().collect::<Vec<_>>(), [aside]);
        assert_eq!(entry.dependencies.events, [(aside, EventUse::Record)]);
    }
}
