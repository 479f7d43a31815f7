//! Which command goes to the driver when: dependencies, deferred commands, waiting without blocking, rest.

pub(crate) mod callbacks;
pub(crate) mod deferred;
pub(crate) mod deferred_early;
pub(crate) mod deferred_frees;
pub(crate) mod deferred_settings;
pub(crate) mod deferred_state;
pub(crate) mod dependencies;
pub(crate) mod event_fields;
pub(crate) mod mem_ops;
pub(crate) mod rest;
pub(crate) mod times;
