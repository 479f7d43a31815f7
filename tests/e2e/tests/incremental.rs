//! Dumps that build on earlier ones of the same processes, and compressed ones.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::ensure;
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::image::length;
use rekindle_e2e::{App, Image, Node, Result};

/// Starts `steady` with memory that it writes once, and memory that it goes on writing; the program ends when the file
/// exists.
fn start(node: &Node) -> Result<(App, PathBuf)> {
    let until = node.path("until");
    let arguments = ["--until", &*until.to_string_lossy(), "--ballast-kib", "16384", "--sleep-us", "2000"];
    let app = node.run("steady", &arguments)?;
    app.reaches(20)?;
    Ok((app, until))
}

/// The number of bytes in the image's own data and code files.
fn stored(image: &Image) -> Result<u64> {
    let files = image.files()?;
    let files = files.iter().filter(|name| name.starts_with("rekindle-data") || name.starts_with("rekindle-code"));
    files.map(|name| length(&image.path(name))).sum()
}

fn goes_on_to_its_end(node: &Node, image: &Image, until: &Path) -> Result {
    let app = node.restore(image)?;
    app.advances()?;
    fs::write(until, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    Ok(fs::remove_file(until)?)
}

fn rekindle(node: &Node, verb: &str, image: &Image) -> Result<(Option<i32>, String)> {
    let output = node.rekindle(&[OsStr::new(verb), image.dir.as_os_str()])?;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    Ok((output.status.code(), said.into_owned()))
}

#[test]
fn a_dump_on_another_writes_what_has_changed_and_is_restored_through_the_chain() -> Result {
    let node = Node::start()?;
    let (app, until) = start(&node)?;
    let first = node.dump(&app)?;
    app.advances()?;
    let second = node.dump_on(&app, &first)?;
    app.advances()?;
    let third = node.dump_on(&app, &second)?;
    app.kill()?;
    let (all, changed) = (stored(&first)?, stored(&third)?);
    ensure!(all > 16 << 20 && changed < all / 4, "{changed} bytes of {all} were written again");
    assert_eq!(rekindle(&node, "verify", &third)?.0, Some(0));

    // Without the image that they build on, neither of the two can be used.
    let away = first.dir.with_extension("away");
    fs::rename(&first.dir, &away)?;
    for image in [&second, &third] {
        node.try_restore(image)?.fails_with("image builds on the one in")?;
        for verb in ["verify", "inspect", "flatten"] {
            let (code, said) = rekindle(&node, verb, image)?;
            ensure!(code == Some(4) && said.contains("image builds on the one in"), "{verb}: {code:?}, {said}");
        }
    }
    node.is_idle()?;
    fs::rename(&away, &first.dir)?;
    goes_on_to_its_end(&node, &third, &until)?;

    // A flattened image needs no other image.
    let (code, said) = rekindle(&node, "flatten", &second)?;
    assert_eq!(code, Some(0), "{said}");
    fs::remove_dir_all(&first.dir)?;
    assert_eq!(rekindle(&node, "verify", &second)?.0, Some(0));
    goes_on_to_its_end(&node, &second, &until)?;
    // The third image builds on the second as it was before: its restore reports that the second has changed.
    node.try_restore(&third)?.fails_with("has been changed or written again since")?;
    node.finish()
}

#[test]
fn a_restored_program_is_dumped_on_its_own_image_and_on_none_that_is_bad() -> Result {
    let node = Node::start()?;
    let (app, until) = start(&node)?;
    let first = node.dump(&app)?;
    app.kill()?;
    let app = node.restore(&first)?;
    app.advances()?;
    let second = node.dump_on(&app, &first)?;
    ensure!(stored(&second)? < stored(&first)? / 4, "an image of a restored program is new");
    // The same dump by `rekindle checkpoint --on`.
    let by_command = Image { dir: node.fresh("image"), ..second.clone() };
    let (pid, on) = (app.pid().to_string(), second.dir.as_os_str());
    let arguments = ["checkpoint".as_ref(), "--on".as_ref(), on, pid.as_ref(), by_command.dir.as_os_str()];
    let said = node.rekindle(&arguments)?;
    ensure!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    ensure!(stored(&by_command)? < stored(&first)? / 4, "what is built on was written again");
    assert_eq!(rekindle(&node, "verify", &by_command)?.0, Some(0));
    // A dump cannot build on a bad image: it then contains all of the memory.
    fs::remove_file(first.path("rekindle.commit"))?;
    let third = node.dump_on(&app, &second)?;
    ensure!(stored(&third)? > 16 << 20, "it was built on a bad image");
    app.kill()?;
    goes_on_to_its_end(&node, &third, &until)?;
    node.finish()
}

#[test]
fn a_compressed_image_is_smaller_and_is_built_on_and_restored_as_another() -> Result {
    let arguments = ["--iterations", "150", "--largest-kib", "4096", "--sleep-us", "5000"];
    let expected = undisturbed("memory", &arguments)?;
    for (compression, protocol) in [("lz4", "recopy"), ("zstd", "cow")] {
        let configuration = format!(
            "[image]\ncompression = \"{compression}\"\nfile_mib = 1\n[checkpoint]\nprotocol = \"{protocol}\"\n"
        );
        let node = Node::configured(&configuration, &[])?;
        let app = node.run("memory", &arguments)?;
        app.reaches(50)?;
        let first = node.dump(&app)?;
        let second = node.dump_on(&app, &first)?;
        app.kill()?;
        for image in [&first, &second] {
            let (code, said) = rekindle(&node, "verify", image)?;
            ensure!(code == Some(0), "{compression}, {protocol}: {said}");
        }
        let (_, said) = rekindle(&node, "inspect", &first)?;
        ensure!(said.contains("of that compressed"), "{compression}: {said}");
        assert_eq!(node.restore(&second)?.finish()?, expected, "{compression}, {protocol}");
        node.finish()?;
    }
    Ok(())
}
