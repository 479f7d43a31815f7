//! `rekindle warm`.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use rekindle_images::Image;
use rekindle_wire::control::{Reply, Request, Resident, WarmInfo};

use crate::failure::Failure;
use crate::{daemon, output};

/// The options of `rekindle warm`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The image directory [default: list the warm images]; with --forget also the image's id
    dir: Option<PathBuf>,
    /// Have the content of GPU memory on the GPU too: `each` waiting worker has it, so that a restore loads nothing; or it is
    /// there `once`, and each restore copies it on the GPU; or it is `shared`, and restored programs have memory of their own only
    /// for what they write
    #[arg(long, value_name = "each|once|shared", requires = "dir", num_args = 0..=1, default_missing_value = "each", require_equals = true)]
    resident: Option<Where>,
    /// The number of restores for which workers wait; with 0 only the image's files are kept in host memory
    #[arg(long, value_name = "N", default_value_t = 1, requires = "dir")]
    copies: u32,
    /// No longer keep the image warm
    #[arg(long, requires = "dir", conflicts_with_all = ["resident", "copies"])]
    forget: bool,
    #[command(flatten)]
    daemon: daemon::At,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// How the content of GPU memory is on the GPU.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Where {
    Each,
    Once,
    Shared,
}

impl From<Where> for Resident {
    fn from(it: Where) -> Self {
        match it {
            Where::Each => Self::Each,
            Where::Once => Self::Once,
            Where::Shared => Self::Shared,
        }
    }
}

/// Keeps an image ready for restores, or lists those that are.
pub(crate) fn warm(options: &Options) -> Result<(), Failure> {
    let socket = options.daemon.socket()?;
    let reply = match &options.dir {
        None => daemon::ask(&socket, &Request::WarmImages)?,
        // The list names images whose directories may be gone, or have other images by now.
        Some(dir) if options.forget && Image::open(dir).is_err() => {
            let path = std::path::absolute(dir).with_context(|| format!("cannot tell where {} is", dir.display()))?;
            let is_id = !dir.as_os_str().as_encoded_bytes().contains(&b'/') && !path.exists();
            let name = if is_id { dir.display() } else { path.display() }.to_string();
            daemon::ask(&socket, &Request::ForgetWarmNamed { name })?
        }
        Some(dir) => {
            // A directory without an image, or with a bad one, has its own exit code.
            Image::open(dir)?;
            let directory = File::open(dir).with_context(|| format!("cannot open the directory {}", dir.display()))?;
            let request = match options.forget {
                true => Request::ForgetWarm,
                false => Request::Warm { copies: options.copies, resident: options.resident.map(Into::into) },
            };
            daemon::ask_long(&socket, &request, &[directory.as_raw_fd()])?
        }
    };
    let Reply::Warm(images) = reply else { return Err(daemon::unexpected_answer().into()) };
    if options.json {
        output::print_json(&images)?;
    } else if options.forget {
        output::print("the image is no longer kept warm\n")?;
    } else {
        output::print(&table(&images))?;
    }
    Ok(())
}

fn table(images: &[WarmInfo]) -> String {
    let head = ["IMAGE", "MEMORY", "READY", "RESTORES", "LAST USED", "DIRECTORY"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(images.iter().map(|it| {
        let resident = match it.resident {
            None => "",
            Some(Resident::Each) => ", resident",
            Some(Resident::Once) => ", resident once",
            Some(Resident::Shared) => ", shared",
        };
        let directory = output::plain(&it.directory);
        vec![
            output::plain(&it.image),
            output::size(it.bytes),
            format!("{} of {}{resident}", it.ready, it.copies),
            it.restores.to_string(),
            format!("{} s ago", Duration::from_millis(it.idle_ms).as_secs()),
            match &it.problem {
                Some(problem) => format!("{directory} (no worker waits: {})", output::plain(problem)),
                None => directory,
            },
        ]
    }));
    output::table(&rows, &[1, 3])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_to_an_image() {
        let image = |directory: &str, resident: Option<Resident>, problem: Option<&str>| WarmInfo {
            image: "3f2a".to_owned(),
            directory: directory.to_owned(),
            bytes: 3 << 30,
            resident,
            copies: 2,
            ready: 1,
            restores: 7,
            idle_ms: 12_900,
            problem: problem.map(str::to_owned),
        };
        let images = [image("/images/llama", None, None), image("/a\x1b", Some(Resident::Each), Some("no\nroom"))];
        let expected = "\
IMAGE   MEMORY  READY             RESTORES  LAST USED  DIRECTORY
3f2a   3.0 GiB  1 of 2                   7  12 s ago   /images/llama
3f2a   3.0 GiB  1 of 2, resident         7  12 s ago   /a\u{fffd} (no worker waits: no\u{fffd}room)
";
        assert_eq!(table(&images), expected);
    }
}
