//! Cache entries that a change makes stale, however the change ends.

use std::sync::Arc;

use zae_limiter_model::EntityId;

use crate::limiter::Inner;
use crate::record::ConfigLevel;

/// The cache entries that a change affects.
#[derive(Clone, Debug)]
pub(crate) enum Entries {
    /// Those of one entity.
    Of(EntityId),
    All,
}

impl From<&ConfigLevel> for Entries {
    fn from(level: &ConfigLevel) -> Self {
        match level {
            ConfigLevel::Entity(entity) | ConfigLevel::EntityResource(entity, _) => {
                Self::Of(entity.clone())
            }
            ConfigLevel::System | ConfigLevel::Resource(_) => Self::All,
        }
    }
}

impl Entries {
    pub(crate) fn forget(&self, inner: &Inner) {
        match self {
            Self::Of(entity) => inner.cache.invalidate_entity(entity),
            Self::All => inner.cache.invalidate_all(),
        }
    }
}

/// Guards a write to the store. When it is dropped, the cache forgets the entries: the write may have been made although
/// its future was dropped or its answer lost. Such a write may also still be under way, so the cache forgets them once
/// more when no write can be.
#[derive(Debug)]
pub(crate) struct Stale<'a> {
    inner: &'a Arc<Inner>,
    entries: Entries,
    is_answered: bool,
}

impl<'a> Stale<'a> {
    pub(crate) fn new(inner: &'a Arc<Inner>, entries: Entries) -> Self {
        Self { inner, entries, is_answered: false }
    }

    /// The store has answered: no write is under way.
    pub(crate) fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for Stale<'_> {
    fn drop(&mut self) {
        self.entries.forget(self.inner);
        if self.is_answered {
            return;
        }
        let (inner, entries) = (Arc::clone(self.inner), self.entries.clone());
        self.inner.background.carry_out(async move {
            inner.clock.sleep(inner.settings.admin_deadline).await;
            entries.forget(&inner);
        });
    }
}
