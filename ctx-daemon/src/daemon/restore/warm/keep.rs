//! Keeping workers ready for restores of a warm image: one thread for each image.

use std::sync::Arc;

use rekindle_wire::control::{Failing, FailureKind, Resident};
use tracing::info;

use super::super::super::worker::Timeout;
use super::super::super::{Daemon, thread};
use super::super::advance::Workers;
use super::super::check;
use super::super::error::RestoreError;
use super::super::load::Mode;
use super::images::{Set, Task, Template, WarmImage};

/// Starts the thread that keeps workers ready until the image is forgotten.
pub(super) fn start(daemon: &Arc<Daemon>, image: &Arc<WarmImage>) -> std::io::Result<()> {
    let (daemon, image) = (Arc::clone(daemon), Arc::clone(image));
    thread("warm", move || {
        loop {
            let task = image.task();
            if matches!(task, Task::Make { .. } | Task::MakeTemplate) {
                daemon.pool.wait_for_restores();
            }
            let done = match task {
                Task::End => return image.write_lessons(),
                Task::Write => {
                    image.write_lessons();
                    Ok(())
                }
                Task::MakeTemplate => make_template(&daemon, &image).map(|template| image.made_template(template)),
                Task::Make { resident, template } => make(&daemon, &image, resident, template.as_deref()).map(|set| {
                    info!(image = %image.name(), ?resident, "workers wait for a restore of a warm image");
                    image.made(set);
                }),
            };
            if let Err(error) = done {
                image.failed(error.to_string(), is_lasting(&error));
            }
        }
    })
    .map(drop)
}

/// Whether another attempt can only fail alike.
fn is_lasting(error: &RestoreError) -> bool {
    matches!(error.kind(), FailureKind::Refused | FailureKind::Version | FailureKind::BadImage)
}

/// Workers that have loaded the clients of the image.
fn make(
    daemon: &Daemon,
    image: &Arc<WarmImage>,
    resident: Option<Resident>,
    template: Option<&Template>,
) -> Result<Set, RestoreError> {
    let taken = Workers::take(daemon, &image.manifest)?;
    let set = Set { workers: taken.all.clone(), gpus: taken.gpus.clone(), resident, borrows: false };
    // A worker that is taken by a restore gets another action.
    for worker in &set.workers {
        let image = Arc::downgrade(image);
        worker.on_death(move || {
            if let Some(image) = image.upgrade() {
                image.look_again();
            }
        });
    }
    // Content on other GPUs would cross a link as well.
    let template = template.filter(|it| it.gpus == set.gpus);
    let set = match (template, resident) {
        (Some(template), Some(Resident::Shared)) => {
            lend(daemon, image, &set, template).inspect_err(|_| set.end())?;
            Set { borrows: true, ..set }
        }
        _ => set,
    };
    let mode = if resident == Some(Resident::Each) { Mode::Early } else { Mode::Warm };
    let filled = taken.fill(daemon, &image.manifest, image.content(), mode, Vec::new());
    let filled = filled.and_then(|_| match template {
        Some(template) if !set.borrows => copy_from(daemon, image, &set, template),
        _ => Ok(()),
    });
    filled.inspect_err(|_| set.end())?;
    Ok(set)
}

/// Loads the clients once, and keeps the memory that has their content. Its workers end: they have no purpose but that.
fn make_template(daemon: &Daemon, image: &WarmImage) -> Result<Template, RestoreError> {
    let workers = Workers::take(daemon, &image.manifest)?;
    let filled = workers.fill(daemon, &image.manifest, image.content(), Mode::Early, Vec::new());
    let exported = filled.and_then(|_| workers.export(daemon, &image.manifest));
    workers.end();
    Ok(Template { clients: exported?, gpus: workers.gpus })
}

/// Has the workers borrow memory from the template when they load.
fn lend(daemon: &Daemon, image: &Arc<WarmImage>, set: &Set, template: &Template) -> Result<(), RestoreError> {
    let timeout = Timeout::WhileItWorks(daemon.config.timeouts.stall);
    let clients = check::attached(&image.manifest).zip(&set.workers).zip(&template.clients);
    for (place, ((record, worker), pieces)) in clients.enumerate() {
        let teacher = Arc::downgrade(image);
        worker.on_learned(move |learned, is_fault| {
            if let Some(image) = teacher.upgrade() {
                image.learn(place, learned, is_fault);
            }
        });
        let lent = worker.borrow(&image.lessons(place), timeout).and_then(|()| worker.take_template(pieces, timeout));
        lent.map_err(|error| RestoreError::Worker(check::name(record), error))?;
    }
    Ok(())
}

/// Has the workers copy content from the template when a restore begins.
fn copy_from(daemon: &Daemon, image: &WarmImage, set: &Set, template: &Template) -> Result<(), RestoreError> {
    let timeout = Timeout::WhileItWorks(daemon.config.timeouts.stall);
    let clients = check::attached(&image.manifest).zip(&set.workers).zip(&template.clients);
    for ((record, worker), pieces) in clients {
        let taken = worker.take_template(pieces, timeout);
        taken.map_err(|error| RestoreError::Worker(check::name(record), error))?;
    }
    Ok(())
}
