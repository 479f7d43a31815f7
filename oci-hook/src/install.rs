//! Installing the hook for podman and the plugin for CRIU on a host, and removing them: the hook's file in podman's hooks.d,
//! and the folder of CRIU's plugins in CRIU's configuration. No file of the administrator is overwritten.
//!
//! CRIU has one folder of plugins. If its configuration names none, `install` adds a line with Rekindle's folder, and links
//! CRIU's other plugins into it. If it names another folder, `install` links Rekindle's plugin into that one.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// The hook's file in hooks.d.
const HOOK_FILE: &str = "rekindle.json";
/// The CDI specification's file.
const CDI_FILE: &str = "rekindle.json";
/// The plugin's file in a folder of plugins.
const PLUGIN: &str = "rekindle.so";
/// The comment above the line that is added to CRIU's configuration.
const MARK: &str = "# Rekindle's plugin, and links to CRIU's other ones:";
/// CRIU's plugin for NVIDIA's driver. It also handles clients, so CRIU would not call Rekindle's plugin for them.
const CONFLICTING_PLUGIN: &str = "cuda_plugin.so";

/// The places that are changed.
#[derive(Debug)]
pub(crate) struct Places {
    /// podman's hooks.d.
    pub(crate) hooks_dir: PathBuf,
    /// The folder of CDI specifications.
    pub(crate) cdi_dir: PathBuf,
    /// CRIU's configuration.
    pub(crate) criu_conf: PathBuf,
    /// CRIU's default folder of plugins.
    pub(crate) criu_plugins: PathBuf,
    /// The folder with Rekindle's plugin.
    pub(crate) plugin_dir: PathBuf,
}

/// An error of `install` or `uninstall`. Completed steps stay; both commands can be repeated.
#[derive(Debug, Error)]
pub(crate) enum InstallError {
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("no CRIU plugin at {} (--plugin-dir says where it is)", .0.display())]
    NoPlugin(PathBuf),
    #[error("{} exists and does not belong to Rekindle: move it away", .0.display())]
    Taken(PathBuf),
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> InstallError + '_ {
    move |source| InstallError::File { path: path.into(), source }
}

/// Lets engines find the hook and the devices, and returns a line for each step. `cdi` may be the reason for which there is no CDI
/// specification: the hook is installed then.
pub(crate) fn for_engines(
    places: &Places,
    hook: &str,
    cdi: Result<String, String>,
) -> Result<Vec<String>, InstallError> {
    let mut done = Vec::new();
    let file = places.hooks_dir.join(HOOK_FILE);
    write(&file, hook)?;
    done.push(format!("podman's hook: {}", file.display()));
    let file = places.cdi_dir.join(CDI_FILE);
    match cdi {
        Ok(cdi) => {
            write(&file, &cdi)?;
            done.push(format!("CDI specification: {}", file.display()));
        }
        Err(reason) => done.push(format!(
            "no CDI specification, which needs the daemon ({reason}): rekindle-oci-hook cdi generate --output {} writes it",
            file.display()
        )),
    }
    Ok(done)
}

/// Lets CRIU find the plugin, and returns a line for each step.
pub(crate) fn for_criu(places: &Places) -> Result<Vec<String>, InstallError> {
    let plugin = places.plugin_dir.join(PLUGIN);
    if !plugin.is_file() {
        return Err(InstallError::NoPlugin(plugin));
    }
    let mut done = Vec::new();
    let conf = read(&places.criu_conf)?;
    match libdir(&conf) {
        Some(dir) if dir == places.plugin_dir => {}
        Some(dir) => {
            let link = dir.join(PLUGIN);
            link_to(&plugin, &link)?;
            done.push(format!("linked into the folder that {} names: {}", places.criu_conf.display(), link.display()));
            return Ok(done);
        }
        None => {
            let line_end = if conf.is_empty() || conf.ends_with('\n') { "" } else { "\n" };
            let added = format!("{conf}{line_end}{MARK}\nlibdir {}\n", places.plugin_dir.display());
            write(&places.criu_conf, &added)?;
            done.push(format!("added to {}: libdir {}", places.criu_conf.display(), places.plugin_dir.display()));
        }
    }
    for other in plugins(&places.criu_plugins)? {
        let name = other.file_name().unwrap_or_default();
        if name == PLUGIN {
            continue;
        }
        if name == CONFLICTING_PLUGIN {
            done.push(format!("left out: {}, which would handle Rekindle's clients", other.display()));
            continue;
        }
        link_to(&other, &places.plugin_dir.join(name))?;
        done.push(format!("linked beside Rekindle's plugin: {}", other.display()));
    }
    Ok(done)
}

/// Removes the files that [`for_engines`] has created, and nothing else.
pub(crate) fn remove_for_engines(places: &Places) -> Result<Vec<String>, InstallError> {
    let mut done = Vec::new();
    for file in [places.hooks_dir.join(HOOK_FILE), places.cdi_dir.join(CDI_FILE)] {
        if remove(&file)? {
            done.push(format!("removed {}", file.display()));
        }
    }
    Ok(done)
}

/// Removes the lines and links that [`for_criu`] has created, and nothing else.
pub(crate) fn remove_for_criu(places: &Places) -> Result<Vec<String>, InstallError> {
    let mut done = Vec::new();
    let conf = read(&places.criu_conf)?;
    let ours = format!("{MARK}\nlibdir {}\n", places.plugin_dir.display());
    if conf.contains(&ours) {
        write(&places.criu_conf, &conf.replace(&ours, ""))?;
        done.push(format!("removed libdir from {}", places.criu_conf.display()));
    } else if let Some(dir) = libdir(&conf).filter(|dir| *dir != places.plugin_dir) {
        let link = dir.join(PLUGIN);
        if fs::read_link(&link).is_ok_and(|to| to == places.plugin_dir.join(PLUGIN)) && remove(&link)? {
            done.push(format!("removed {}", link.display()));
        }
    }
    for other in plugins(&places.plugin_dir)? {
        if fs::read_link(&other).is_ok_and(|to| to.parent() == Some(&places.criu_plugins)) && remove(&other)? {
            done.push(format!("removed {}", other.display()));
        }
    }
    Ok(done)
}

/// The folder that CRIU's configuration names; the last line counts.
fn libdir(conf: &str) -> Option<PathBuf> {
    let lines = conf.lines().map(|line| line.split('#').next().unwrap_or_default());
    let words = lines.map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut named = words.filter_map(|words| match words[..] {
        ["libdir" | "--libdir", dir] => Some(PathBuf::from(dir.trim_matches('"'))),
        _ => None,
    });
    named.next_back()
}

fn read(path: &Path) -> Result<String, InstallError> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        result => result.map_err(failed(path)),
    }
}

/// Replaces a file atomically: it has the old content or all of the new.
pub(crate) fn write(path: &Path, content: &str) -> Result<(), InstallError> {
    let new = path.with_extension("rekindle-new");
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(dir).map_err(failed(dir))?;
    fs::write(&new, content).map_err(failed(&new))?;
    if let Ok(about) = fs::metadata(path) {
        fs::set_permissions(&new, about.permissions()).map_err(failed(&new))?;
    }
    fs::rename(&new, path).map_err(failed(path))
}

fn remove(path: &Path) -> Result<bool, InstallError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(InstallError::File { path: path.into(), source }),
    }
}

fn link_to(file: &Path, link: &Path) -> Result<(), InstallError> {
    match fs::read_link(link) {
        Ok(to) if to == file => return Ok(()),
        Ok(_) => return Err(InstallError::Taken(link.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(_) => return Err(InstallError::Taken(link.into())),
    }
    symlink(file, link).map_err(failed(link))
}

fn plugins(dir: &Path) -> Result<Vec<PathBuf>, InstallError> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed(dir))?,
    };
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>();
    let mut paths = paths.map_err(failed(dir))?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "so"));
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    struct Host {
        dir: TempDir,
        places: Places,
    }

    impl Host {
        /// A host with CRIU's own plugins and, if given, a configuration.
        fn new(conf: Option<&str>) -> Self {
            let dir = TempDir::new().unwrap();
            let at = |name: &str| dir.path().join(name);
            let places = Places {
                hooks_dir: at("hooks.d"),
                cdi_dir: at("cdi"),
                criu_conf: at("criu/default.conf"),
                criu_plugins: at("lib/criu"),
                plugin_dir: at("rekindle/criu"),
            };
            for dir in ["criu", "lib/criu", "rekindle/criu", "theirs"] {
                fs::create_dir_all(at(dir)).unwrap();
            }
            for file in ["lib/criu/amdgpu_plugin.so", "lib/criu/cuda_plugin.so", "rekindle/criu/rekindle.so"] {
                fs::write(at(file), "").unwrap();
            }
            if let Some(conf) = conf {
                fs::write(&places.criu_conf, conf.replace("@", at("").to_str().unwrap())).unwrap();
            }
            Self { dir, places }
        }

        /// All files with their content, and where links lead.
        fn files(&self) -> Vec<(PathBuf, String)> {
            let mut files = Vec::new();
            let mut dirs = vec![self.dir.path().to_owned()];
            while let Some(dir) = dirs.pop() {
                for entry in fs::read_dir(dir).unwrap().flatten() {
                    let path = entry.path();
                    if entry.file_type().unwrap().is_dir() {
                        dirs.push(path);
                    } else {
                        let target = fs::read_link(&path).map(|to| to.display().to_string());
                        files.push((path.clone(), target.unwrap_or_else(|_| fs::read_to_string(&path).unwrap())));
                    }
                }
            }
            files.sort();
            files
        }
    }

    fn install(places: &Places, hook: &str, cdi: Result<String, String>) -> Result<Vec<String>, InstallError> {
        Ok([for_engines(places, hook, cdi)?, for_criu(places)?].concat())
    }

    fn uninstall(places: &Places) -> Result<Vec<String>, InstallError> {
        Ok([remove_for_engines(places)?, remove_for_criu(places)?].concat())
    }

    #[test]
    fn uninstall_restores_the_state_before_install() {
        for conf in ["", "tcp-established", "log-file dump.log\n", "libdir @/theirs # the administrator's\n"] {
            let host = Host::new(Some(conf));
            let before = host.files();
            install(&host.places, "hook", Ok("cdi".to_owned())).unwrap();
            let installed = host.files();
            assert_ne!(before, installed);
            install(&host.places, "hook", Ok("cdi".to_owned())).unwrap();
            assert_eq!(host.files(), installed, "twice is once");
            uninstall(&host.places).unwrap();
            // A last line without an end has one now.
            let mut expected = before;
            for (path, content) in &mut expected {
                if *path == host.places.criu_conf && !content.is_empty() && !content.ends_with('\n') {
                    content.push('\n');
                }
            }
            assert_eq!(host.files(), expected);
            assert!(uninstall(&host.places).unwrap().is_empty());
        }
    }

    #[test]
    fn crius_other_plugins_are_linked_except_the_conflicting_one() {
        let host = Host::new(None);
        install(&host.places, "hook", Ok("cdi".to_owned())).unwrap();
        let conf = fs::read_to_string(&host.places.criu_conf).unwrap();
        assert_eq!(libdir(&conf).unwrap(), host.places.plugin_dir);
        assert!(host.places.plugin_dir.join("amdgpu_plugin.so").is_symlink());
        assert!(!host.places.plugin_dir.join("cuda_plugin.so").exists());
        assert_eq!(fs::read_to_string(host.places.hooks_dir.join("rekindle.json")).unwrap(), "hook");
    }

    #[test]
    fn a_configured_plugin_folder_gets_a_link_to_the_plugin() {
        let host = Host::new(Some("libdir /elsewhere\nlibdir @/theirs\n"));
        let before = fs::read_to_string(&host.places.criu_conf).unwrap();
        install(&host.places, "hook", Ok("cdi".to_owned())).unwrap();
        assert_eq!(fs::read_to_string(&host.places.criu_conf).unwrap(), before);
        let link = host.dir.path().join("theirs/rekindle.so");
        assert_eq!(fs::read_link(link).unwrap(), host.places.plugin_dir.join("rekindle.so"));
    }

    #[test]
    fn install_names_and_keeps_a_file_in_its_way() {
        let host = Host::new(Some("libdir @/theirs\n"));
        let theirs = host.dir.path().join("theirs/rekindle.so");
        fs::write(&theirs, "theirs").unwrap();
        assert!(
            matches!(install(&host.places, "hook", Ok("cdi".to_owned())), Err(InstallError::Taken(path)) if path == theirs)
        );
        assert_eq!(fs::read_to_string(&theirs).unwrap(), "theirs");
        uninstall(&host.places).unwrap();
        assert_eq!(fs::read_to_string(&theirs).unwrap(), "theirs");

        fs::remove_file(host.places.plugin_dir.join("rekindle.so")).unwrap();
        assert!(matches!(install(&host.places, "hook", Ok("cdi".to_owned())), Err(InstallError::NoPlugin(_))));
    }
}
