//! Balances, read without taking anything.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_model::{
    Bucket, EntityId, ExceedsCapacity, LimitStatus, Millitokens, ResourceName, Timestamp, amount,
};

use crate::acquire::{Chain, unknown_limits};
use crate::error::Error;
use crate::limiter::RateLimiter;
use crate::page::{Page, PageRequest};
use crate::pages::Pages;
use crate::plan::{BucketKey, Target};
use crate::skew::Checked;
use crate::store::{BucketQuery, StoredBucket};

/// One bucket of an entity and its current balances.
///
/// ```
/// # use zae_limiter_core::{Limit, MemoryStore, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new())
/// #     .default_limits([Limit::per_minute("rpm", 100)]).open().await?;
/// limiter.acquire("key-1", "gpt-4").take("rpm", 3).await?.commit().await?;
/// for bucket in limiter.buckets("key-1")?.all().await? {
///     println!("{}: {} of {} left", bucket.resource, bucket.limits[0].available, bucket.limits[0].rate.capacity());
/// }
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BucketStatus {
    /// The resource that the bucket is for.
    pub resource: ResourceName,
    /// The status of every limit of the entity on the resource.
    pub limits: Vec<LimitStatus>,
    /// When the bucket expires if nobody uses it; `None` if it does not expire.
    pub expires_at: Option<Timestamp>,
}

/// The capacity and the balance of one entity's limit on a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EntityCapacity {
    /// The owner of the limit.
    pub entity: EntityId,
    /// The ceiling.
    pub capacity: Millitokens,
    /// The balance; negative is debt.
    pub available: Millitokens,
    /// The ancestors that calls of the entity also take this limit from, nearest first. What the entity has left is a
    /// part of what each of them has left. One that has no bucket is not listed itself.
    pub ancestors: Vec<EntityId>,
}

impl EntityCapacity {
    /// The nearest ancestor that is listed.
    pub fn within<'a>(&'a self, listed: &BTreeSet<&EntityId>) -> Option<&'a EntityId> {
        self.ancestors.iter().find(|ancestor| listed.contains(ancestor))
    }
}

/// The sums of a limit's capacities and balances on a resource. They count a token once: entities whose calls also take
/// from a listed ancestor ([`EntityCapacity::within`]) are not added to that ancestor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResourceCapacity {
    /// How many entities have a bucket and the limit, those within others included.
    pub entities: u64,
    /// The sum of the ceilings, in tokens.
    pub capacity: i128,
    /// The sum of the balances, in tokens, each rounded down.
    pub available: i128,
}

impl ResourceCapacity {
    /// Adds up all entities of a list.
    pub fn of(entities: &[EntityCapacity]) -> Self {
        let listed: BTreeSet<&EntityId> = entities.iter().map(|entity| &entity.entity).collect();
        let mut total = Self { entities: entities.len() as u64, ..Self::default() };
        for entity in entities.iter().filter(|entity| entity.within(&listed).is_none()) {
            total.capacity += i128::from(entity.capacity.whole_tokens());
            total.available += i128::from(entity.available.whole_tokens());
        }
        total
    }

    /// The fraction of the capacity that is in use: 0 to 1, or more in debt.
    pub fn utilization(&self) -> f64 {
        if self.capacity == 0 {
            return 0.0;
        }
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let ratio = (self.capacity - self.available) as f64 / self.capacity as f64;
        ratio
    }
}

impl RateLimiter {
    /// The status of every limit of an entity on a resource, and of the ancestors it cascades to: the
    /// balance, and the wait until `amounts` would pass. Takes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownLimits`], [`Error::ExceedsCapacity`], [`Error::Invalid`]; an error of the
    /// store.
    pub async fn available(
        &self,
        entity: &str,
        resource: &str,
        amounts: &[(&str, u64)],
    ) -> Result<Vec<LimitStatus>, Error> {
        let (entity, resource) = (EntityId::new(entity)?, ResourceName::new(resource)?);
        let amounts = sums(amounts)?;
        let at = self.inner.now();
        let now = at.now;
        let chain =
            self.inner.call(self.inner.chain(&entity, &resource, Chain::new(), now)).await??;
        let own = chain[0].limits();
        if amounts.iter().any(|(name, _)| own.position(name).is_none()) {
            return Err(unknown_limits(&chain[0], amounts.iter().map(|(name, _)| *name)));
        }
        let keys: Vec<_> = chain.iter().map(|target| target.key().clone()).collect();
        let buckets = self.inner.call(self.store().peek(&keys, now)).await?;
        let mut statuses = Vec::new();
        for ((level, target), bucket) in chain.iter().enumerate().zip(buckets) {
            statuses.extend(statuses_of(level, target, bucket, &amounts, at)?);
        }
        Ok(statuses)
    }

    /// How long until `amounts` would pass, if nobody else takes tokens. Takes nothing.
    ///
    /// # Errors
    ///
    /// As [`available`](Self::available).
    pub async fn time_until_available(
        &self,
        entity: &str,
        resource: &str,
        amounts: &[(&str, u64)],
    ) -> Result<Duration, Error> {
        let statuses = self.available(entity, resource, amounts).await?;
        Ok(statuses.iter().map(|status| status.retry_after).max().unwrap_or_default())
    }

    /// The buckets of an entity, by resource, with the current limits and balances. Expired buckets are left out. An
    /// entity has a bucket for each resource that it has called.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the id.
    pub fn buckets(&self, entity: &str) -> Result<Pages<BucketStatus>, Error> {
        let query = BucketQuery::OfEntity(self.namespace_id().clone(), EntityId::new(entity)?);
        let limiter = self.clone();
        Ok(Pages::new(move |page: PageRequest| {
            let (limiter, query) = (limiter.clone(), query.clone());
            async move {
                let list = limiter.store().list_buckets(&query, &page);
                let page = limiter.inner.call(list).await?;
                let mut items = Vec::with_capacity(page.items.len());
                for stored in page.items {
                    items.extend(limiter.bucket_status(stored).await?);
                }
                Ok(Page { items, next: page.next })
            }
        }))
    }

    /// `None` for a bucket that has expired.
    async fn bucket_status(&self, stored: StoredBucket) -> Result<Option<BucketStatus>, Error> {
        let at = self.inner.now();
        let now = at.now;
        if stored.expires_at.is_some_and(|expiry| expiry <= now) {
            return Ok(None);
        }
        let BucketKey { entity, resource, .. } = stored.key;
        let target = self.inner.call(self.inner.resolve(&entity, &resource, now)).await?;
        let limits = statuses_of(0, &target, Some(stored.bucket), &[], at)?;
        Ok(Some(BucketStatus { resource, limits, expires_at: stored.expires_at }))
    }

    /// The capacity and the balance of a limit for each entity with a bucket on a resource, by entity. The limits are
    /// those that hold now: an entity that no longer has the limit is left out.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the name.
    pub fn entity_capacities(
        &self,
        resource: &str,
        limit: &str,
    ) -> Result<Pages<EntityCapacity>, Error> {
        let resource = ResourceName::new(resource)?;
        let query = BucketQuery::OnResource(self.namespace_id().clone(), resource);
        let (limiter, limit) = (self.clone(), limit.to_owned());
        Ok(Pages::new(move |page: PageRequest| {
            let (limiter, query, limit) = (limiter.clone(), query.clone(), limit.clone());
            async move {
                let list = limiter.store().list_buckets(&query, &page);
                let page = limiter.inner.call(list).await?;
                let mut items = Vec::with_capacity(page.items.len());
                for stored in page.items {
                    items.extend(limiter.entity_capacity(stored, &limit).await?);
                }
                Ok(Page { items, next: page.next })
            }
        }))
    }

    /// `None` for a bucket that has expired, or whose entity no longer has the limit.
    async fn entity_capacity(
        &self,
        stored: StoredBucket,
        limit: &str,
    ) -> Result<Option<EntityCapacity>, Error> {
        let at = self.inner.now();
        let now = at.now;
        if stored.expires_at.is_some_and(|expiry| expiry <= now) {
            return Ok(None);
        }
        let BucketKey { entity, resource, .. } = stored.key;
        // Above a hierarchy that has become too deep, or a circle, nothing is taken.
        let looked_up = self.inner.chain(&entity, &resource, Chain::new(), now);
        let chain = match self.inner.call(looked_up).await? {
            Ok(chain) => chain,
            Err(_) => return Ok(None),
        };
        let has = |target: &Target| target.limits().position(limit).is_some();
        let (own, above) = chain.split_first().expect("the entity comes first");
        let mut statuses = statuses_of(0, own, Some(stored.bucket), &[], at)?.into_iter();
        let ancestors = above.iter().filter(|target| has(target));
        Ok(statuses.find(|status| status.limit_name.as_str() == limit).map(|status| {
            EntityCapacity {
                entity,
                capacity: status.rate.capacity(),
                available: status.available,
                ancestors: ancestors.map(|target| target.key().entity.clone()).collect(),
            }
        }))
    }

    /// The sums of a limit's capacities and balances over all entities with a bucket on a resource, without those within
    /// others. Reads all of them into memory: an ancestor may come after its descendants.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the name; an error of the store.
    pub async fn resource_capacity(
        &self,
        resource: &str,
        limit: &str,
    ) -> Result<ResourceCapacity, Error> {
        let entities = self.entity_capacities(resource, limit)?.all().await?;
        Ok(ResourceCapacity::of(&entities))
    }
}

/// Amounts of a limit that is named twice add up, as in an acquire.
fn sums<'a>(amounts: &[(&'a str, u64)]) -> Result<Vec<(&'a str, Millitokens)>, Error> {
    let mut sums: Vec<(&str, u64)> = Vec::with_capacity(amounts.len());
    for (name, tokens) in amounts {
        match sums.iter_mut().find(|(other, _)| other == name) {
            Some((_, sum)) => *sum = sum.saturating_add(*tokens),
            None => sums.push((name, *tokens)),
        }
    }
    sums.into_iter().map(|(name, tokens)| Ok((name, amount(tokens)?))).collect()
}

pub(crate) fn statuses_of(
    level: usize,
    target: &Target,
    bucket: Option<Bucket>,
    amounts: &[(&str, Millitokens)],
    Checked { now, max_skew }: Checked,
) -> Result<Vec<LimitStatus>, Error> {
    let mut bucket = bucket.unwrap_or_else(|| Bucket::full(Arc::clone(target.limits()), now));
    if let Some(max_skew) = max_skew {
        // As the next acquire will do.
        bucket.rewind(now, max_skew);
    }
    bucket.follow(target.limits(), now);
    bucket.refill(now);
    let mut statuses = Vec::new();
    for name in target.limits().names() {
        let at = bucket.limits().position(name.as_str()).expect("followed just now");
        let rate = bucket.limits().rates()[at];
        let asked = amounts.iter().find(|(asked, _)| *asked == name.as_str());
        let requested = asked.map_or(Millitokens::ZERO, |(_, amount)| *amount);
        if requested > rate.capacity() {
            let owner = (target.key().entity.clone(), level);
            let capacity = rate.capacity();
            return Err(ExceedsCapacity::new(owner, name.clone(), requested, capacity).into());
        }
        let retry_after = bucket.wait_for(at, requested, now);
        statuses.push(LimitStatus {
            entity_id: target.key().entity.clone(),
            level,
            resource: target.key().resource.clone(),
            limit_name: name.clone(),
            rate,
            available: bucket.cells()[at].tokens,
            requested,
            exceeded: !retry_after.is_zero(),
            retry_after,
            full_after: bucket.wait_for(at, rate.capacity(), now),
        });
    }
    Ok(statuses)
}
