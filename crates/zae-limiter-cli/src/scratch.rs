//! A temporary namespace for commands that fill a store with test data.

use std::sync::Arc;

use zae_limiter::{Builder, Namespaces, RateLimiter};

use crate::context::Context;
use crate::failure::Failure;
use crate::figures::grouped;
use crate::printer::Printer;

/// A new namespace on a store that may hold other namespaces.
#[derive(Debug)]
pub(crate) struct ScratchNamespace {
    /// A limiter in the namespace.
    pub limiter: RateLimiter,
    registry: Namespaces,
}

impl ScratchNamespace {
    /// Registers a namespace on the requested store and opens a limiter in it, with the builder
    /// that `configure` returns.
    ///
    /// # Errors
    ///
    /// When the store cannot be opened or written.
    pub(crate) async fn open(
        context: &mut Context,
        prefix: &str,
        configure: impl FnOnce(Builder) -> Builder,
    ) -> Result<Self, Failure> {
        let registry = context.default_limiter().await?;
        // The process id tells programs apart that start in the same millisecond.
        let millis = context.clock.now().as_millis();
        let name = format!("{prefix}-{millis}-{}", std::process::id());
        let (store, registry) = (Arc::clone(registry.store()), registry.namespaces());
        registry.register(&name).await?;
        context.printer.detail(format!("namespace: {name}"));
        let builder = context.builder_over(store).namespace(&name);
        let limiter = configure(builder).open().await?;
        Ok(Self { limiter, registry })
    }

    /// Deletes the namespace and purges its items.
    ///
    /// # Errors
    ///
    /// When the store cannot be written. The user can purge the namespace later.
    pub(crate) async fn remove(self, printer: &mut Printer) -> Result<(), Failure> {
        let name = self.limiter.namespace().clone();
        let removed = self.remove_items(printer).await;
        printer.wipe_progress();
        removed.map_err(|failure| {
            let hint =
                format!("items may remain in namespace {name}: zae-limiter namespace orphans");
            failure.hint(hint)
        })
    }

    async fn remove_items(&self, printer: &mut Printer) -> Result<(), Failure> {
        let deleted = self.registry.delete(self.limiter.namespace().as_str()).await?;
        let progress = |items| printer.progress(format!("cleaning up: {} items", grouped(items)));
        self.registry.purge(&deleted.id, progress).await?;
        Ok(())
    }
}
