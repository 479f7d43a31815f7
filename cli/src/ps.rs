//! `rekindle ps`.

use std::time::Duration;

use clap::Args;
use rekindle_wire::control::{ClientInfo, Reply, Request};

use crate::failure::Failure;
use crate::{access, calls, daemon, output};

/// How much of a container's name is shown.
const CONTAINER: usize = 12;

/// The options of `rekindle ps`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    daemon: daemon::At,
    /// List the driver calls of this process, refused ones first
    #[arg(long, value_name = "PID")]
    calls: Option<i32>,
    /// Show what this process's commands were predicted to write or use, and what they did (needs `access.report` in the
    /// daemon's configuration)
    #[arg(long, value_name = "PID", conflicts_with = "calls")]
    access: Option<i32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Lists the processes.
pub(crate) fn ps(options: &Options) -> Result<(), Failure> {
    let socket = options.daemon.socket()?;
    if let Some(pid) = options.calls {
        return calls::calls(&socket, pid, options.json);
    }
    if let Some(pid) = options.access {
        return access::access(&socket, pid, options.json);
    }
    let Reply::Clients(clients) = daemon::ask(&socket, &Request::List)? else {
        return Err(daemon::unexpected_answer().into());
    };
    if options.json {
        output::print_json(&clients)?;
    } else {
        output::print(&table(&clients))?;
    }
    Ok(())
}

fn table(clients: &[ClientInfo]) -> String {
    let heads = [
        "PID",
        "WORKER",
        "STATE",
        "GPU MEMORY",
        "GPU TIME",
        "PINNED",
        "COMMANDS",
        "PROTOCOL",
        "USER",
        "CONTAINER",
        "NAME",
    ];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    rows.extend(clients.iter().map(|client| {
        let memory = client.device_memory.iter().copied().map(output::size);
        let memory: Vec<_> = memory.collect();
        vec![
            client.pid.to_string(),
            client.worker.to_string(),
            state(client),
            // One size for each GPU, and one time for all.
            memory.join(" + "),
            gpu_time(&client.gpu_time_ns),
            output::size(client.pinned_memory),
            client.commands.to_string(),
            output::plain(if client.protocol.is_empty() { "-" } else { &client.protocol }),
            client.owner.user.map_or_else(|| "-".to_owned(), user_name),
            // As podman and others show it.
            output::plain(client.owner.container.as_deref().unwrap_or("-")).chars().take(CONTAINER).collect(),
            output::plain(&client.command),
        ]
    }));
    output::table(&rows, &[0, 1, 3, 4, 5, 6])
}

/// The sum of the times on all GPUs, as `top` and `ps` write such times, or `-` where the worker does not count.
fn gpu_time(nanoseconds: &[u64]) -> String {
    if nanoseconds.is_empty() {
        return "-".to_owned();
    }
    let hundredths = nanoseconds.iter().sum::<u64>() / 10_000_000;
    let (minutes, seconds) = (hundredths / 6000, hundredths / 100 % 60);
    match minutes {
        0..60 => format!("{minutes}:{seconds:02}.{:02}", hundredths % 100),
        _ => format!("{}:{:02}:{seconds:02}", minutes / 60, minutes % 60),
    }
}

/// The name of a user, as this machine knows it, or the number where it has no name.
fn user_name(user: u32) -> String {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    // Fields: name, password, number, ...
    let named = users.lines().find(|line| line.split(':').nth(2).and_then(|it| it.parse().ok()) == Some(user));
    let name = named.and_then(|line| line.split(':').next());
    name.map_or_else(|| user.to_string(), output::plain)
}

/// The state of a process, with the progress of its dump, or of its return from a suspension.
fn state(client: &ClientInfo) -> String {
    let state = output::plain(&client.state);
    match client.suspended {
        Some(it) if it.deep && it.waits_for_room => {
            let why = client.not_moved.as_deref().map_or_else(String::new, |why| format!(": {}", output::plain(why)));
            return format!("{state} deeply, waits for a worker{why}");
        }
        Some(it) if it.deep && it.hold => return format!("{state} deeply: until `rekindle resume`"),
        Some(it) if it.deep => return format!("{state} deeply"),
        Some(it) if it.waits_for_room => return format!("{state}: waits for {} of GPU memory", output::size(it.bytes)),
        Some(it) if it.hold => return format!("{state}: until `rekindle resume`"),
        Some(_) => {
            if let Some(whom) = &client.suspended_for {
                return format!("{state}: for {}", output::plain(whom));
            }
        }
        None => {}
    }
    let Some(dump) = &client.dump else { return state };
    let rate = output::rate(dump.done, Duration::from_millis(dump.elapsed_ms));
    let (phase, done, bytes) = (output::plain(&dump.phase), output::size(dump.done), output::size(dump.bytes));
    format!("{state}: {phase}, {done} of {bytes}, {rate}")
}

#[cfg(test)]
mod tests {
    use rekindle_wire::control::{Owner, Suspension};

    use super::*;

    fn client(pid: i32, device_memory: &[u64], command: &str) -> ClientInfo {
        ClientInfo {
            pid,
            worker: pid + 1,
            command: command.to_owned(),
            state: "running".to_owned(),
            device_memory: device_memory.to_vec(),
            gpu_time_ns: if pid == 9 { vec![3_500_000_000, 500_000_000] } else { Vec::new() },
            pinned_memory: 0,
            commands: 7,
            protocol: if pid == 9 { "auto".to_owned() } else { String::new() },
            protocol_reason: "default".to_owned(),
            dump: None,
            suspended: None,
            idle_ms: 0,
            suspended_for: None,
            not_moved: None,
            owner: Owner { user: Some(65_533), container: Some("0123456789abcdef".to_owned()), cgroup: None },
        }
    }

    #[test]
    fn a_suspended_process_says_what_it_waits_for() {
        let suspended = |hold, waits_for_room, deep| ClientInfo {
            state: "suspended".to_owned(),
            suspended: Some(Suspension { bytes: 1 << 30, hold, waits_for_room, deep }),
            ..client(9, &[1 << 30], "python3")
        };
        assert_eq!(state(&suspended(false, false, false)), "suspended");
        assert_eq!(state(&suspended(true, false, false)), "suspended: until `rekindle resume`");
        assert_eq!(state(&suspended(false, true, false)), "suspended: waits for 1.0 GiB of GPU memory");
        assert_eq!(state(&suspended(false, false, true)), "suspended deeply");
        assert_eq!(state(&suspended(true, false, true)), "suspended deeply: until `rekindle resume`");
        let mut waits = suspended(false, true, true);
        assert_eq!(state(&waits), "suspended deeply, waits for a worker");
        waits.not_moved = Some("no\nGPU".to_owned());
        assert_eq!(state(&waits), "suspended deeply, waits for a worker: no\u{fffd}GPU");
    }

    #[test]
    fn gpu_time_reads_as_that_of_processors() {
        assert_eq!(gpu_time(&[]), "-");
        assert_eq!(gpu_time(&[0]), "0:00.00");
        assert_eq!(gpu_time(&[61_234_999_999]), "1:01.23");
        assert_eq!(gpu_time(&[3_599_999_999_999, 1]), "1:00:00");
        assert_eq!(gpu_time(&[360_059_000_000_000]), "100:00:59");
    }

    #[test]
    fn one_line_to_a_process() {
        let clients = [client(9, &[3 << 30, 0], "python3"), client(31_415, &[1 << 20], "bad\x1b[2Jname")];
        let expected = "  \
              PID  WORKER  STATE       GPU MEMORY  GPU TIME  PINNED  COMMANDS  PROTOCOL  USER   CONTAINER     NAME
    9      10  running  3.0 GiB + 0 B   0:04.00     0 B         7  auto      65533  0123456789ab  python3
31415   31416  running        1.0 MiB         -     0 B         7  -         65533  0123456789ab  bad\u{fffd}[2Jname
";
        assert_eq!(table(&clients), expected);
        let suspended = |hold, waits_for_room| ClientInfo {
            state: "suspended".to_owned(),
            suspended: Some(Suspension { bytes: 1 << 20, hold, waits_for_room, deep: false }),
            suspended_for: Some("process 4 (jax)".to_owned()),
            ..client(9, &[1 << 20], "python3")
        };
        assert_eq!(state(&suspended(false, false)), "suspended: for process 4 (jax)");
        assert_eq!(state(&suspended(true, false)), "suspended: until `rekindle resume`");
        assert_eq!(state(&suspended(false, true)), "suspended: waits for 1.0 MiB of GPU memory");
    }
}
