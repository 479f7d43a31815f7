//! `rekindle images`: images in stores.

mod copy;
mod place;
mod show;

use std::io;
use std::path::PathBuf;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use rekindle_stores::{Address, Collected, StoreError, Verified};
use serde::Serialize;

pub(crate) use self::copy::{Target, fetch};
pub(crate) use self::place::Key;
use self::place::{CommonOptions, named};
use crate::failure::Failure;
use crate::output;

/// The options of `rekindle images`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Make a store
    Init {
        /// A directory, s3://BUCKET/PREFIX or ssh://USER@HOST:PORT/DIR
        url: String,
        /// Encrypt what is in it; it needs a key
        #[arg(long)]
        encrypt: bool,
        #[command(flatten)]
        common: CommonOptions,
    },
    /// List the images in a store
    Ls {
        /// The store [default: the one that REKINDLE_STORE names]
        url: Option<String>,
        #[command(flatten)]
        common: CommonOptions,
    },
    /// Show a store, or an image in it with its files
    Show {
        /// The store, or the image: URL/NAME
        url: String,
        #[command(flatten)]
        common: CommonOptions,
    },
    /// Copy an image from a directory into a store, from a store into a directory, or from one store to another
    Copy {
        /// The image: a directory, an archive of a container (.tar or .tar.zst), or URL/NAME in a store
        from: String,
        /// The store, or URL/NAME in it; or a directory, which must not exist or be empty
        to: String,
        /// The key of the store FROM, or `none`, if it is not that of the store TO
        #[arg(long, value_name = "FILE")]
        from_key: Option<PathBuf>,
        #[command(flatten)]
        common: CommonOptions,
    },
    /// Remove images from a store; `gc` then removes what no image needs any more
    Rm {
        /// The images: URL/NAME
        #[arg(required = true)]
        urls: Vec<String>,
        #[command(flatten)]
        common: CommonOptions,
    },
    /// Remove from a store what no image needs; uploads may run meanwhile
    Gc {
        /// The store
        url: String,
        /// Only say what that would be
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        common: CommonOptions,
    },
    /// Read a whole store, or an image in it, and compare every hash
    Verify {
        /// The store, or the image: URL/NAME
        url: String,
        #[command(flatten)]
        common: CommonOptions,
    },
    /// Serve a store's directory over standard input and output: what `ssh://` starts on the other host
    #[command(hide = true)]
    Serve {
        /// The directory
        dir: PathBuf,
    },
}

/// The program.
pub(crate) fn images(options: &Options) -> Result<(), Failure> {
    match &options.verb {
        Verb::Init { url, encrypt, common } => init(url, *encrypt, common),
        Verb::Ls { url, common } => show::list(&store_named(url.as_deref())?, common),
        Verb::Show { url, common } => show::show(url, common),
        Verb::Copy { from, to, from_key, common } => copy::copy(from, to, from_key.as_deref(), common),
        Verb::Rm { urls, common } => urls.iter().try_for_each(|url| remove(url, common)),
        Verb::Gc { url, dry_run, common } => collect(url, *dry_run, common),
        Verb::Verify { url, common } => verify(url, common),
        Verb::Serve { dir } => Ok(rekindle_stores::serve(dir, io::stdin().lock(), io::stdout().lock())?),
    }
}

/// The address of the store that is meant.
fn store_named(url: Option<&str>) -> Result<String, Failure> {
    let named = || std::env::var("REKINDLE_STORE").ok().filter(|it| !it.is_empty());
    let found = url.map(str::to_owned).or_else(named);
    found.ok_or_else(|| Failure::usage(anyhow!("name a store, or set REKINDLE_STORE to one")))
}

fn init(url: &str, encrypt: bool, common: &CommonOptions) -> Result<(), Failure> {
    let store = Address::parse(url)?.create(common.key.get()?.as_ref(), encrypt)?;
    show::describe(&store, common.json)
}

#[derive(Serialize)]
struct Removed {
    removed: String,
}

fn remove(url: &str, common: &CommonOptions) -> Result<(), Failure> {
    let (store, name) = named(url, &common.key)?;
    store.remove(&name)?;
    if common.json {
        output::print_json(&Removed { removed: name })?;
    }
    Ok(())
}

fn collect(url: &str, dry_run: bool, common: &CommonOptions) -> Result<(), Failure> {
    let address = Address::parse(url)?;
    let store = address.open(common.key.get()?.as_ref())?.ok_or_else(|| StoreError::NoStore { url: url.to_owned() })?;
    let done = store.collect(dry_run)?;
    if common.json {
        output::print_json(&done)?;
        return Ok(());
    }
    let Collected { images, uploads, removed_objects, removed_bytes, kept_objects, objects, bytes } = done;
    let what = if dry_run { "would be removed" } else { "removed" };
    let mut text = format!("{removed_objects} objects with {} {what}\n", output::size(removed_bytes));
    if kept_objects > 0 {
        text += &format!("{kept_objects} objects are kept for {uploads} uploads that run now\n");
    }
    text += &format!("{images} images, {objects} objects with {}\n", output::size(bytes));
    output::print(&text)?;
    Ok(())
}

fn verify(url: &str, common: &CommonOptions) -> Result<(), Failure> {
    let (store, name) = Address::parse(url)?.find(common.key.get()?.as_ref())?;
    let bar = copy::Shown::new("verify", common.json);
    let report = store.verify(name.as_deref(), &|it| bar.show(it));
    bar.clear();
    let report = report?;
    if common.json {
        output::print_json(&report)?;
    } else {
        output::print(&described(&report))?;
    }
    match report.problems.len() {
        0 => Ok(()),
        count => Err(Failure::bad_image(anyhow!("{url} is bad in {count} places"))),
    }
}

fn described(report: &Verified) -> String {
    let mut text = String::new();
    for problem in &report.problems {
        text += &format!("{}: {}", output::plain(&problem.object), output::plain(&problem.what));
        if !problem.images.is_empty() {
            text += &format!(" (needed by {})", output::plain(&problem.images.join(", ")));
        }
        text.push('\n');
    }
    let judged = if report.problems.is_empty() { "good" } else { "bad" };
    let Verified { images, pieces, bytes, .. } = report;
    text + &format!("{judged}: {images} images and {pieces} pieces, {} read\n", output::size(*bytes))
}
