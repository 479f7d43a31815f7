//! `rekindle migrate --with-address`: a service whose address moves with it, while clients on a third machine ask it. CRIU 4.1 cannot dump
//! their connections on Linux 6.16 and later.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use rekindle_e2e::app::Identity;
use rekindle_e2e::hosts::{HERE, Hosts, THERE};
use rekindle_e2e::network::{DEVICE, Machine, Network};
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Result, process, stage, until};
use serde_json::Value;

const PORT: u16 = 7500;
/// The port of the program that runs directly, which may be on the same host.
const PORT_OF_DIRECT: u16 = 7501;
/// The addresses that move.
const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 9));
const ADDRESS_6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 9));
/// The clients that stay connected. Each has a number from 1 on.
const CLIENTS: usize = 6;
/// The number of the one that connects anew all the time (`tests/apps/answers.cu`).
const ANEW: u64 = 0;
/// The requests of one connection of that.
const SHORT: u64 = 3;
/// The requests that are on their way at a time.
const AT_ONCE: u64 = 3;
/// The time limit for an answer: only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(200);

/// The request of a client with this number.
fn request(client: u64, number: u64) -> u64 {
    (client << 32 | number).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A connection to the service.
struct Connection(TcpStream);

impl Connection {
    fn open(to: SocketAddr, client: u64) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&to, PATIENCE).context("cannot connect")?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let mut connection = Self(stream);
        connection.0.write_all(&client.to_le_bytes())?;
        Ok(connection)
    }

    /// Asks so many requests at once, and takes their answers.
    fn ask(&mut self, client: u64, from: u64, count: u64, answers: &mut Vec<u64>) -> Result {
        let asked: Vec<u8> = (from..from + count).flat_map(|it| request(client, it).to_le_bytes()).collect();
        self.0.write_all(&asked).context("cannot ask")?;
        for _ in 0..count {
            let mut answer = [0; 8];
            self.0.read_exact(&mut answer).context("no answer")?;
            answers.push(u64::from_le_bytes(answer));
        }
        Ok(())
    }
}

/// Clients on the third machine, which ask until they are told to end.
struct Clients {
    is_over: Arc<AtomicBool>,
    /// How much each has been answered.
    answered: Arc<Vec<AtomicU64>>,
    /// Each returns its answers.
    threads: Vec<JoinHandle<Result<Vec<u64>>>>,
}

impl Clients {
    fn start(network: &Network) -> Result<Self> {
        let is_over = Arc::new(AtomicBool::new(false));
        let answered = Arc::new((0..=CLIENTS).map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
        let start = |client: u64| -> Result<JoinHandle<Result<Vec<u64>>>> {
            let (is_over, answered) = (Arc::clone(&is_over), Arc::clone(&answered));
            // Half of them by IPv6.
            let address = if client.is_multiple_of(2) { ADDRESS } else { ADDRESS_6 };
            let run = move || {
                let count = &answered[client as usize];
                if client == ANEW { connects_anew(&is_over, count) } else { asks(address, client, &is_over, count) }
            };
            // The thread that it starts is in that network, too.
            network.among_clients(|| Ok(std::thread::spawn(run)))
        };
        let threads = (0..=CLIENTS as u64).map(start).collect::<Result<_>>()?;
        let clients = Self { is_over, answered, threads };
        clients.advance()?;
        Ok(clients)
    }

    /// All get answers that they had not asked for before.
    fn advance(&self) -> Result {
        let before: Vec<_> = self.answered.iter().map(|it| it.load(Ordering::Relaxed)).collect();
        until("all clients are answered", || {
            if let Some(ended) = self.threads.iter().position(JoinHandle::is_finished) {
                bail!("client {ended} has ended");
            }
            let now = self.answered.iter().map(|it| it.load(Ordering::Relaxed));
            Ok(now.zip(&before).all(|(now, before)| now > before + 2 * AT_ONCE).then_some(()))
        })
    }

    /// Ends them. Their answers must be those of the program that runs directly.
    fn finish(self) -> Result {
        self.is_over.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for (client, thread) in self.threads.into_iter().enumerate() {
            let answers = thread.join().map_err(|_| anyhow!("client {client} panicked"))?;
            all.push(answers.with_context(|| format!("client {client}"))?);
        }
        let asked: u64 = all.iter().map(|it| it.len() as u64).sum();
        eprintln!("{asked} requests, {} connections of the one that connects anew", all[0].len() as u64 / SHORT);
        for (client, answers) in all.iter().enumerate() {
            let client = client as u64;
            let count = if client == ANEW { SHORT } else { answers.len() as u64 };
            let expected = directly(client, count)?;
            for answers in answers.chunks(count.max(1) as usize) {
                ensure!(answers == expected, "client {client} has other answers than the program gives directly");
            }
        }
        Ok(())
    }
}

/// A client that stays connected.
fn asks(address: IpAddr, client: u64, is_over: &AtomicBool, answered: &AtomicU64) -> Result<Vec<u64>> {
    let mut connection = Connection::open(SocketAddr::new(address, PORT), client)?;
    let mut answers = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let from = answers.len() as u64;
        connection.ask(client, from, AT_ONCE, &mut answers)?;
        answered.store(answers.len() as u64, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(answers)
}

/// A client that connects anew all the time.
fn connects_anew(is_over: &AtomicBool, answered: &AtomicU64) -> Result<Vec<u64>> {
    let mut answers = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let address = if (answers.len() as u64 / SHORT).is_multiple_of(2) { ADDRESS } else { ADDRESS_6 };
        let mut connection = Connection::open(SocketAddr::new(address, PORT), ANEW)?;
        connection.ask(ANEW, 0, SHORT, &mut answers)?;
        answered.store(answers.len() as u64, Ordering::Relaxed);
    }
    Ok(answers)
}

/// What the program answers without Rekindle, to a client that asks one request after another.
fn directly(client: u64, count: u64) -> Result<Vec<u64>> {
    let end = tempfile::tempdir()?;
    let file = end.path().join("end");
    let mut command = Command::new(stage::app("answers")?);
    stage::clean_environment(&mut command);
    command.args(["--port", &PORT_OF_DIRECT.to_string(), "--until"]).arg(&file);
    command.env("LD_LIBRARY_PATH", stage::software_gpu()?).stdout(Stdio::piped());
    let mut program = command.spawn()?;
    let mut answers = Vec::new();
    let localhost = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT_OF_DIRECT));
    let mut connection = until("the program listens", || {
        ensure!(program.try_wait()?.is_none(), "the program has ended");
        Ok(Connection::open(localhost, client).ok())
    })?;
    for number in 0..count {
        connection.ask(client, number, 1, &mut answers)?;
    }
    fs::write(file, "")?;
    ensure!(program.wait_with_output()?.status.success());
    Ok(answers)
}

/// Where the service is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Here,
    There,
}

impl Place {
    fn machine(self) -> Machine {
        match self {
            Self::Here => Machine::Here,
            Self::There => Machine::Elsewhere,
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Here => Self::There,
            Self::There => Self::Here,
        }
    }
}

/// Two hosts, the service on one of them, and clients on a third machine.
struct Case {
    hosts: Hosts,
    clients: Clients,
    identity: Identity,
    /// The service, where it is.
    app: Option<App>,
    place: Place,
}

impl Case {
    fn start() -> Result<Self> {
        let hosts = Hosts::with_clients()?;
        hosts.network().ip(Machine::Here, &format!("address add {ADDRESS}/24 dev {DEVICE} label {DEVICE}:moves"))?;
        hosts.network().ip(Machine::Here, &format!("address add {ADDRESS_6}/64 dev {DEVICE} nodad preferred_lft 0"))?;
        let end = hosts.here.path("end").display().to_string();
        let app = hosts.here.run("answers", &["--port", &PORT.to_string(), "--until", &end])?;
        app.says("port ")?;
        let clients = Clients::start(hosts.network())?;
        Ok(Self { identity: app.identity().clone(), hosts, clients, app: Some(app), place: Place::Here })
    }

    /// The words of `rekindle migrate` with which either host reaches the other one.
    fn words(&self, first: &[&str]) -> Result<Vec<String>> {
        let (here, rekindle) = (&self.hosts.here, stage::program("rekindle")?);
        let text = |path: &std::path::Path| path.to_string_lossy().into_owned();
        let options = [
            ("--via", text(&self.hosts.via())),
            ("--rekindle", text(&rekindle)),
            ("--dir", text(&here.path("moves/out"))),
            ("--dir-there", text(&here.path("moves/in"))),
        ];
        let options = options.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
        Ok(["migrate"].iter().chain(first).map(|it| (*it).to_owned()).chain(options).collect())
    }

    /// Runs `rekindle` where the service is. What it says goes to a file: a connection may outlive it, and a pipe's end with it.
    fn run(&self, words: &[String]) -> Result<(ExitStatus, String, String)> {
        let (out, err) = (self.hosts.here.path("said.out"), self.hosts.here.path("said.err"));
        let rekindle = stage::program("rekindle")?;
        let mut command = match self.place {
            Place::Here => self.hosts.here.command(&rekindle)?,
            Place::There => self.hosts.there.inside(&rekindle),
        };
        // What a test has put in the place of the system's programs.
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.hosts.here.path("bin").display()));
        command.args(words).stdin(Stdio::null()).stdout(fs::File::create(&out)?).stderr(fs::File::create(&err)?);
        let status = command.status()?;
        Ok((status, fs::read_to_string(out)?, fs::read_to_string(err)?))
    }

    /// Moves the service from where it is, over connections to which this happens.
    fn migrate(&self, happens: &str) -> Result<(ExitStatus, String, String)> {
        let (pid, four, six) = (self.identity.pid.to_string(), ADDRESS.to_string(), format!("{ADDRESS_6},{DEVICE}"));
        let host = if self.place == Place::Here { THERE } else { HERE };
        let words = self.words(&[&pid, host, "--json", "--with-address", &four, "--with-address", &six])?;
        self.hosts.happens(happens)?;
        let said = self.run(&words)?;
        let (status, out, err) = &said;
        eprintln!("{happens:?}: {status} {out} {err}");
        until_true("it has happened", || Ok(happens.is_empty() || self.hosts.has_happened()?))?;
        self.hosts.happens("")?;
        Ok(said)
    }

    /// The service has moved to the other host.
    fn has_moved(&mut self) -> Result {
        let app = self.app.take().context("a service")?;
        self.place = self.place.other();
        self.app = Some(match self.place {
            Place::There => {
                let tree = process::tree(app.pid());
                app.was_killed(&tree)?;
                self.hosts.there.app(&self.identity)?
            }
            Place::Here => {
                process::wait_gone("the service, which has moved", app.pid())?;
                std::mem::forget(app);
                App::adopt(self.identity.clone())
            }
        });
        self.is_whole()
    }

    /// The addresses are where the service is, and only there, for good; nothing keeps packets away; all clients are answered.
    fn is_whole(&self) -> Result {
        let network = self.hosts.network();
        for address in [ADDRESS, ADDRESS_6] {
            let said = self.address(self.place.machine(), address)?;
            ensure!(said.contains("valid_lft forever"), "{address}: {said:?}");
            let is_as_before = if address.is_ipv4() { "cable:moves" } else { "deprecated" };
            ensure!(said.contains(is_as_before), "{address} is not as before: {said:?}");
            let other = self.address(self.place.other().machine(), address)?;
            ensure!(other.is_empty(), "{address} is on both hosts: {other:?}");
        }
        for machine in [Machine::Here, Machine::Elsewhere] {
            // A guard may end later than its command.
            let nothing_is_kept_away = || Ok(!self.tables(machine)?.contains("rekindle"));
            until_true("nothing is kept away", nothing_is_kept_away)?;
        }
        self.clients.advance()?;
        let hardware = network.hardware(self.place.machine())?;
        for address in [ADDRESS, ADDRESS_6] {
            let known = network.ip(Machine::Clients, &format!("neigh show to {address}"))?;
            ensure!(known.contains(&hardware), "the clients know {address} at {known:?}, and not at {hardware}");
        }
        Ok(())
    }

    /// What a machine says of an address, if it has it.
    fn address(&self, machine: Machine, address: IpAddr) -> Result<String> {
        self.hosts.network().ip(machine, &format!("address show to {address}"))
    }

    /// The tables of rules of a machine.
    fn tables(&self, machine: Machine) -> Result<String> {
        let list = || {
            let output = Command::new("nft").args(["list", "tables"]).output()?;
            ensure!(output.status.success(), "{output:?}");
            Ok(String::from_utf8(output.stdout)?)
        };
        match machine {
            Machine::Here => list(),
            _ => self.hosts.network().elsewhere(list),
        }
    }

    /// Settles the migration to the other host that waits there, if there is one.
    fn settle(&self) -> Result<Option<String>> {
        let into = self.hosts.here.path("moves/in");
        let left = fs::read_dir(&into)?.flatten().map(|it| it.path());
        let Some(dir) = left.into_iter().find(|it| it.join("restore").exists()) else { return Ok(None) };
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let host = if self.place == Place::Here { THERE } else { HERE };
        let (status, out, err) = self.run(&self.words(&["--settle", &name, host])?)?;
        ensure!(status.success(), "{status} {out} {err}");
        Ok(Some(out))
    }

    /// The shell command that ends the command that moves the service, or the other host's part in it.
    fn kill(&self, command: bool) -> Result<String> {
        let (rekindle, dir) = (stage::program("rekindle")?, self.hosts.here.path("moves"));
        let what = if command { self.identity.pid.to_string() } else { "--receive".to_owned() };
        Ok(format!("pkill -KILL -f '^{} migrate {what} .*{}'", rekindle.display(), dir.display()))
    }

    /// Ends all. The answers must have been right.
    fn finish(mut self) -> Result {
        self.clients.finish()?;
        fs::write(self.hosts.here.path("end"), "")?;
        let app = self.app.take().context("a service")?;
        match self.place {
            Place::Here => ensure!(app.finish()?.ends_with("answers ok\n")),
            Place::There => {
                until("the service ends", || Ok(process::is_gone(app.pid()).then_some(())))?;
                ensure!(app.output()?.ends_with("answers ok\n"));
                std::mem::forget(app);
            }
        }
        self.hosts.finish()
    }
}

#[test]
fn a_service_moves_to_and_fro_with_its_addresses_and_no_client_notices() -> Result {
    let mut case = Case::start()?;
    let mut random = Random::new();
    for _ in 0..4 * repetitions() {
        // At another moment of the clients' each time.
        std::thread::sleep(Duration::from_millis(random.below(20)));
        let (status, out, err) = case.migrate("")?;
        ensure!(status.success(), "{status} {err}");
        let said: Value = serde_json::from_str(&out)?;
        ensure!(said["addresses"] == serde_json::json!([ADDRESS, ADDRESS_6]) && said["moved"] == true, "{said:#}");
        case.has_moved()?;
    }
    case.finish()
}

#[test]
fn whatever_ends_before_the_decision_the_service_goes_on_here_with_its_addresses() -> Result {
    let mut case = Case::start()?;
    // A relay that is killed passes nothing on, and does not say that it has happened.
    let silent = format!("; printf over >'{}'; kill -KILL $PPID", case.hosts.plan_file().display());
    for (is_command, when, then) in
        [(false, "after {\"Restore\"", ""), (false, "before \"Held\"", silent.as_str()), (true, "before \"Held\"", "")]
    {
        let (status, _, err) = case.migrate(&format!("{when} {}{then}", case.kill(is_command)?))?;
        ensure!(!status.success(), "{status} {err}");
        if is_command {
            // The other host waits until it hears that.
            case.clients.advance().context(err)?;
            until("the migration is settled", || Ok(case.settle()?.filter(|it| it.contains("go on here"))))?;
        }
        until("nothing waits there", || Ok(case.settle()?.is_none().then_some(())))?;
        case.is_whole()?;
    }
    let (status, _, err) = case.migrate("")?;
    ensure!(status.success(), "{err}");
    case.has_moved()?;
    case.finish()
}

#[test]
fn whatever_ends_after_the_decision_the_service_goes_on_there_with_its_addresses() -> Result {
    let mut case = Case::start()?;
    for happens in ["cut".to_owned(), case.kill(false)?, case.kill(true)?] {
        let (status, _, err) = case.migrate(&format!("before \"Own\" {happens}"))?;
        if happens == case.kill(true)? {
            ensure!(!status.success(), "{status}");
            until("the migration is settled", || Ok(case.settle()?.filter(|it| it.contains("run there"))))?;
        } else {
            ensure!(status.success(), "{status} {err}");
        }
        case.has_moved()?;
        let (status, _, err) = case.migrate("")?;
        ensure!(status.success(), "{status} {err}");
        case.has_moved()?;
    }
    case.finish()
}

#[test]
fn a_command_that_is_killed_between_the_decision_and_the_end_of_the_addresses_costs_no_connection() -> Result {
    let mut case = Case::start()?;
    let (bin, armed) = (case.hosts.here.path("bin"), case.hosts.here.path("armed"));
    fs::create_dir(&bin)?;
    let kill = format!("rm {} 2>/dev/null && kill -KILL $PPID && exit 1", armed.display());
    let script =
        format!("#!/bin/sh\ncase \"$*\" in \"address delete\"*) {kill} ;; esac\nPATH=${{PATH#*:}} exec ip \"$@\"\n");
    stage::write_script(&bin.join("ip"), &script)?;
    fs::write(&armed, "")?;
    let (status, _, err) = case.migrate("")?;
    ensure!(!status.success() && !armed.exists(), "{status} {err}");
    // The guard has done it, before anybody settles the migration.
    until_true("the addresses are gone here", || {
        let has = |it: &IpAddr| Ok::<_, anyhow::Error>(!case.address(Machine::Here, *it)?.is_empty());
        Ok(!has(&ADDRESS)? && !has(&ADDRESS_6)?)
    })?;
    until_true("nothing is kept away here", || Ok(!case.tables(Machine::Here)?.contains("rekindle")))?;
    until("the migration is settled", || Ok(case.settle()?.filter(|it| it.contains("run there"))))?;
    case.has_moved()?;
    let (status, _, err) = case.migrate("")?;
    ensure!(status.success(), "{err}");
    case.has_moved()?;
    case.finish()
}

#[test]
fn what_cannot_move_is_refused_before_anything_happens() -> Result {
    let case = Case::start()?;
    let pid = case.identity.pid.to_string();
    let refused = |words: &[&str], text: &str| -> Result {
        let (status, _, err) = case.run(&case.words(&[&[pid.as_str(), THERE], words].concat())?)?;
        ensure!(status.code() == Some(3) && err.contains(text), "{words:?}: {status} {err}");
        Ok(())
    };
    refused(&["--with-address", "198.51.100.77"], "does not have it")?;
    refused(&["--with-address", "198.51.100.1"], "promote_secondaries")?;
    refused(&["--with-address", "198.51.100.9,eth7"], "no device eth7")?;
    case.hosts.network().ip(Machine::Elsewhere, &format!("address add {ADDRESS}/32 dev lo"))?;
    refused(&["--with-address", "198.51.100.9"], "already")?;
    case.hosts.network().ip(Machine::Elsewhere, &format!("address delete {ADDRESS}/32 dev lo"))?;
    case.is_whole()?;
    case.finish()
}
