//! `rekindle inspect` and `rekindle verify`.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, anyhow};
use rekindle_images::{Image, ImageDir, LastRestore, Manifest, Report, Summary};

use serde::Serialize;

use crate::cpu_image::CpuImage;
use crate::descriptors;
use crate::failure::Failure;
use crate::output;

/// The report on an image.
#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    summary: Summary,
    /// What the last restore of the image was like, if that is known.
    last_restore: Option<LastRestore>,
    /// CRIU's part, where it can be read.
    cpu: Option<CpuImage>,
}

/// Shows the contents of an image; of a damaged one the readable parts and the damage.
pub(crate) fn inspect(dir: &Path, json: bool) -> Result<(), Failure> {
    let (summary, last_restore, failure) = match Image::open(dir) {
        Ok(image) => (image.summary(), image.last_restore(), None),
        Err(error) => {
            let readable = ImageDir::open(dir).and_then(|dir| Manifest::peek(&dir));
            match readable {
                Ok(manifest) if error.kind().is_bad_image() => (Summary::of(&manifest), None, Some(error)),
                _ => return Err(error.into()),
            }
        }
    };
    let cpu = CpuImage::of(dir);
    if json {
        output::print_json(&Shown { summary, last_restore, cpu })?;
    } else {
        let last_restore = last_restore.map(|it| it.to_string()).unwrap_or_default();
        let cpu = cpu.map(|it| it.to_string()).unwrap_or_default();
        output::print(&(summary.to_string() + &last_restore + &cpu))?;
    }
    failure.map_or(Ok(()), |error| Err(error.into()))
}

/// Compares every checksum.
pub(crate) fn verify(dir: &Path, json: bool) -> Result<(), Failure> {
    let report = report(dir)?;
    if json {
        output::print_json(&report)?;
    } else {
        let text = describe(&report).context("cannot describe the report")?;
        output::print(&text)?;
    }
    judge(dir, &report)
}

/// Compares every checksum before the image is used. Reports damage on stderr.
pub(crate) fn verify_before(dir: &Path) -> Result<(), Failure> {
    let report = report(dir)?;
    if !report.is_good() {
        eprint!("{}", describe(&report).context("cannot describe the report")?);
    }
    judge(dir, &report)
}

fn report(dir: &Path) -> Result<Report, Failure> {
    descriptors::with_most(|| Ok(Image::open(dir)?.verify(|_| ())))
}

fn judge(dir: &Path, report: &Report) -> Result<(), Failure> {
    if report.is_good() {
        return Ok(Image::open(dir)?.check_companion()?);
    }
    let count = report.problem_count;
    let said = format!("the image in {} is bad in {count} places", dir.display());
    Err(Failure::bad_image(anyhow!(said)))
}

fn describe(report: &Report) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    for problem in &report.problems {
        write!(text, "{}", output::plain(&problem.file))?;
        if let Some(offset) = problem.offset {
            write!(text, ", byte {offset}")?;
        }
        if let Some(region) = &problem.region {
            write!(text, " ({})", output::plain(region))?;
        }
        writeln!(text, ": {}", output::plain(&problem.what))?;
    }
    let listed = report.problems.len() as u64;
    if report.problem_count > listed {
        writeln!(text, "and {} more", report.problem_count - listed)?;
    }
    writeln!(
        text,
        "{}: {} pieces and {} code images, {} read",
        if report.is_good() { "good" } else { "bad" },
        report.pieces,
        report.code_images,
        output::size(report.bytes)
    )?;
    Ok(text)
}
