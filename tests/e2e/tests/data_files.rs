//! Images in which a process's GPU memory is in several data files, since several threads of its worker have written at
//! the same time.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use rekindle_e2e::image::length;
use rekindle_e2e::{App, Image, Node, Result, until};

/// One file for each MiB, up to the number of cores; with `stop` all threads copy. A corrupt file fails the restore, and not
/// the restored program.
const SEVERAL: &str = "[checkpoint]\nprotocol = \"stop\"\n[image]\nfile_mib = 1\n\
    [restore]\nrun_before_loaded = false\n";

fn start(node: &Node) -> Result<(App, PathBuf)> {
    let until = node.path("until");
    let arguments = ["--until", &*until.to_string_lossy(), "--ballast-kib", "65536", "--sleep-us", "2000"];
    let app = node.run("steady", &arguments)?;
    app.reaches(20)?;
    Ok((app, until))
}

fn data_files(image: &Image) -> Result<Vec<String>> {
    Ok(image.files()?.into_iter().filter(|name| name.starts_with("rekindle-data")).collect())
}

fn rekindle(node: &Node, verb: &str, image: &Image) -> Result<(Option<i32>, String)> {
    let output = node.rekindle(&[OsStr::new(verb), image.dir.as_os_str()])?;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    Ok((output.status.code(), said.into_owned()))
}

fn goes_on_to_its_end(node: &Node, image: &Image, until: &Path) -> Result {
    let app = node.restore(image)?;
    app.advances()?;
    fs::write(until, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    Ok(fs::remove_file(until)?)
}

#[test]
fn an_image_of_several_data_files_of_a_process_is_as_good_as_one_of_one() -> Result {
    let cores = std::thread::available_parallelism()?.get();
    if cores < 2 {
        eprintln!("skipped: with one core one thread writes");
        return Ok(());
    }
    let node = Node::configured(SEVERAL, &[])?;
    let (app, until_file) = start(&node)?;
    // The threads do not necessarily write at the same time.
    let first = until("an image has several data files", || {
        let image = node.dump(&app)?;
        Ok((data_files(&image)?.len() > 1).then_some(image))
    })?;
    let files = data_files(&first)?;
    ensure!(files.len() <= cores.min(16) && files.contains(&"rekindle-data-0.raw".to_owned()), "{files:?}");
    for file in &files {
        ensure!(length(&first.path(file))? > 0, "{file} is in the image for nothing");
    }
    app.advances()?;
    // Little memory has changed, so few threads write at the same time.
    let second = node.dump_on(&app, &first)?;
    app.advances()?;
    let third = node.dump_on(&app, &second)?;
    app.kill()?;
    for image in [&first, &second, &third] {
        let (code, said) = rekindle(&node, "verify", image)?;
        ensure!(code == Some(0), "{said}");
        let (code, said) = rekindle(&node, "inspect", image)?;
        ensure!(code == Some(0) && said.contains("steady"), "{said}");
    }

    // The image needs every one of its files.
    let last = files.last().context("there are some")?;
    for (damage, says) in [("flip", "is corrupt"), ("remove", "is missing")] {
        let copy = first.copy(node.fresh("copy"))?;
        if damage == "flip" {
            copy.flip(last, 0)?
        } else {
            copy.remove(last)?
        }
        let (code, said) = rekindle(&node, "verify", &copy)?;
        ensure!(code == Some(4) && said.contains(last.as_str()), "{damage}: {code:?} {said}");
        node.try_restore(&copy)?.fails_with(&format!("{last} {says}"))?;
        node.is_idle()?;
    }

    goes_on_to_its_end(&node, &first, &until_file)?;
    goes_on_to_its_end(&node, &third, &until_file)?;
    let (code, said) = rekindle(&node, "flatten", &third)?;
    ensure!(code == Some(0), "{said}");
    for image in [&first, &second] {
        fs::remove_dir_all(&image.dir)?;
    }
    assert_eq!(rekindle(&node, "verify", &third)?.0, Some(0));
    goes_on_to_its_end(&node, &third, &until_file)?;
    node.finish()
}
