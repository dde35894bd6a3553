//! A namespace of its own for a command that fills a store with things nobody wants to keep.

use std::sync::Arc;

use zae_limiter::{Builder, Namespaces, RateLimiter};

use crate::context::Context;
use crate::failure::Failure;
use crate::figures::grouped;
use crate::printer::Printer;

/// A namespace that did not exist before, on a store that somebody else uses too.
#[derive(Debug)]
pub(crate) struct Fresh {
    /// A limiter in it.
    pub limiter: RateLimiter,
    registry: Namespaces,
}

impl Fresh {
    /// Registers a namespace on the store that was asked for, and opens a limiter in it that
    /// `configure` may have a say in.
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
        // Two programs that start in the same millisecond are two processes.
        let millis = context.clock.now().as_millis();
        let name = format!("{prefix}-{millis}-{}", std::process::id());
        let (store, registry) = (Arc::clone(registry.store()), registry.namespaces());
        registry.register(&name).await?;
        context.printer.detail(format!("namespace: {name}"));
        let builder = context.builder_over(store).namespace(&name);
        let limiter = configure(builder).open().await?;
        Ok(Self { limiter, registry })
    }

    /// Deletes the namespace and purges what is in it.
    ///
    /// # Errors
    ///
    /// When the store cannot be written; the namespace can be purged later.
    pub(crate) async fn remove(self, printer: &mut Printer) -> Result<(), Failure> {
        let name = self.limiter.namespace().clone();
        let removed = self.remove_items(printer).await;
        printer.wipe_progress();
        removed.map_err(|failure| {
            let hint =
                format!("what is left is in namespace {name}: zae-limiter namespace orphans");
            failure.hint(hint)
        })
    }

    async fn remove_items(&self, printer: &mut Printer) -> Result<(), Failure> {
        let deleted = self.registry.delete(self.limiter.namespace().as_str()).await?;
        let progress = |items| printer.progress(format!("tidying up: {} items", grouped(items)));
        self.registry.purge(&deleted.id, progress).await?;
        Ok(())
    }
}
