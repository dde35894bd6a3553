//! A temporary namespace for commands that fill a store with test data.
//!
//! A run that is killed leaves its namespace behind. Nobody can tell it from that of a run on another machine, except by
//! its age: no run lasts longer than [`RUN_MAX`], so after [`DEAD_AFTER`] the next run removes it.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter::model::{Namespace, Object};
use zae_limiter::{Builder, Error, Namespaces, RateLimiter, Timestamp};

use crate::context::Context;
use crate::failure::Failure;
use crate::figures::grouped;
use crate::printer::Printer;

/// The commands that have temporary namespaces.
const COMMANDS: [&str; 2] = ["bench", "demo"];

/// The longest time that a run works in its namespace.
pub(crate) const RUN_MAX: Duration = Duration::from_secs(12 * 3_600);

/// The age of a namespace whose run must have ended: twice the longest run, for clocks that differ and slow cleaning.
pub(crate) const DEAD_AFTER: Duration = Duration::from_secs(24 * 3_600);

/// The most time between the time in a namespace's name and its registration. A namespace that a user has named like
/// this does not fit.
const REGISTERED_WITHIN_MS: u64 = 60_000;

/// A new namespace on a store that may hold other namespaces.
#[derive(Debug)]
pub(crate) struct ScratchNamespace {
    /// A limiter in the namespace.
    pub limiter: RateLimiter,
    registry: Namespaces,
}

impl ScratchNamespace {
    /// Registers a namespace on the requested store and opens a limiter in it, with the builder
    /// that `configure` returns. Removes the namespaces of dead runs.
    ///
    /// # Errors
    ///
    /// When the store cannot be opened or written.
    pub(crate) async fn open(
        context: &mut Context,
        command: &'static str,
        configure: impl FnOnce(Builder) -> Builder,
    ) -> Result<Self, Failure> {
        let default = context.default_limiter().await?;
        let (store, registry) = (Arc::clone(default.store()), default.namespaces());
        // By the time that namespaces are registered with: the clock of this machine may be wrong.
        let now = default.now();
        remove_dead(&registry, now, context).await?;
        let name = name(command, now, std::process::id());
        registry.register(&name).await?;
        context.printer.detail(format!("namespace: {name}"));
        let builder = context.builder_over(store).namespace(&name);
        let limiter = configure(builder).open().await?;
        Ok(Self { limiter, registry })
    }

    /// Deletes the namespace and purges its items. Another interrupt ends that at once.
    ///
    /// # Errors
    ///
    /// When the store cannot be written, or at an interrupt. The next run a day later, or the user, removes the rest.
    pub(crate) async fn remove(self, context: &mut Context) -> Result<(), Failure> {
        let name = self.limiter.namespace().clone();
        let mut interrupts = context.interrupts.later();
        let printer = &mut context.printer;
        let removed = tokio::select! {
            biased;
            interrupt = interrupts.next() => {
                Err(Failure::new(interrupt.status(), "interrupted while cleaning up"))
            }
            removed = self.remove_items(printer) => removed,
        };
        printer.wipe_progress();
        removed.map_err(|failure| {
            failure.hint(format!(
                "items may remain in namespace {name}; a bench or demo a day later removes them   \
                 (now: zae-limiter namespace delete {name}, then zae-limiter namespace orphans)"
            ))
        })
    }

    async fn remove_items(&self, printer: &mut Printer) -> Result<(), Failure> {
        let deleted = self.registry.delete(self.limiter.namespace().as_str()).await?;
        purge(&self.registry, &deleted, printer).await
    }
}

/// The name tells the command, and programs apart that start in the same millisecond.
fn name(command: &str, now: Timestamp, process: u32) -> String {
    format!("{command}-{}-{process}", now.as_millis())
}

/// The command that made the namespace for a run of its own, if one did.
pub(crate) fn made_by(namespace: &Namespace) -> Option<&'static str> {
    let mut parts = namespace.name.as_str().split('-');
    let (command, millis, process) = (parts.next()?, parts.next()?, parts.next()?);
    let command = COMMANDS.into_iter().find(|known| *known == command)?;
    let millis: i64 = millis.parse().ok()?;
    process.parse::<u32>().ok()?;
    let fits = namespace.created_at.as_millis().abs_diff(millis) <= REGISTERED_WITHIN_MS;
    (parts.next().is_none() && fits).then_some(command)
}

/// Whether the run that made the namespace must have ended.
fn is_dead(namespace: &Namespace, now: Timestamp) -> bool {
    made_by(namespace).is_some() && namespace.created_at.saturating_add(DEAD_AFTER) <= now
}

/// Removes the namespaces of dead runs, also those that are deleted but not purged.
async fn remove_dead(
    registry: &Namespaces,
    now: Timestamp,
    context: &mut Context,
) -> Result<(), Failure> {
    let mut dead = Vec::new();
    for mut pages in [registry.list(), registry.orphans()] {
        while let Some(page) = pages.next_page().await? {
            dead.extend(page.into_iter().filter(|namespace| is_dead(namespace, now)));
        }
    }
    for namespace in dead {
        let deleted = match namespace.deleted_at {
            Some(_) => namespace,
            None => match registry.delete(namespace.name.as_str()).await {
                Ok(deleted) => deleted,
                // Another run was faster.
                Err(Error::NotFound(_)) => continue,
                Err(error) => return Err(error.into()),
            },
        };
        purge(registry, &deleted, &mut context.printer).await?;
        context.printer.wipe_progress();
        let name = &deleted.name;
        context.printer.say(format!("removed namespace {name} of a run that was killed"));
    }
    Ok(())
}

async fn purge(
    registry: &Namespaces,
    deleted: &Namespace,
    printer: &mut Printer,
) -> Result<(), Failure> {
    let progress = |items| printer.progress(format!("cleaning up: {} items", grouped(items)));
    match registry.purge(&deleted.id, progress).await {
        // Another run has purged it meanwhile.
        Ok(_) | Err(Error::NotFound(Object::NamespaceId(_))) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use zae_limiter::model::{NamespaceId, NamespaceName};

    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_794_752_736_000);

    fn namespace(name: &str) -> Namespace {
        Namespace {
            id: NamespaceId::new("AbCdEfGhIj_").unwrap(),
            name: NamespaceName::new(name).unwrap(),
            created_at: NOW,
            deleted_at: None,
            is_purging: false,
        }
    }

    #[test]
    fn only_namespaces_that_a_run_has_made_are_temporary() {
        for command in COMMANDS {
            let made = namespace(&name(command, NOW, u32::MAX));
            assert_eq!(made_by(&made), Some(command));
        }
        for other in [
            "default",
            "bench",
            "bench-1794752736000",
            "bench-1794752736000-x",
            "bench-1794752736000-1-1",
            "bench-1794752600000-1",
            "bench--1",
            "load-1794752736000-1",
            "demo-99999999999999999999-1",
        ] {
            assert_eq!(made_by(&namespace(other)), None, "{other}");
        }
    }

    #[test]
    fn a_run_is_dead_when_it_would_have_ended_long_ago() {
        let made = namespace(&name("bench", NOW, 1));
        let after = |time: Duration| NOW.saturating_add(time);
        assert!(DEAD_AFTER >= 2 * RUN_MAX);
        assert!(!is_dead(&made, NOW));
        assert!(!is_dead(&made, after(DEAD_AFTER - Duration::from_millis(1))));
        assert!(is_dead(&made, after(DEAD_AFTER)));
        assert!(!is_dead(&namespace("team-a"), after(DEAD_AFTER * 1_000)));
    }
}
