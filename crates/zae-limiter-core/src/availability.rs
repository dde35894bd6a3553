//! What is there now, without taking anything.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_model::{
    Bucket, EntityId, ExceedsCapacity, LimitStatus, Millitokens, ResourceName, Timestamp, amount,
};

use crate::error::Error;
use crate::limiter::RateLimiter;
use crate::page::PageRequest;
use crate::pages::Pages;
use crate::plan::Target;
use crate::store::{BucketQuery, StoredBucket};

/// What one entity has of a limit on a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntityCapacity {
    /// Who.
    pub entity: EntityId,
    /// The ceiling.
    pub capacity: Millitokens,
    /// What is there now; negative is debt.
    pub available: Millitokens,
}

/// What all entities together have of a limit on a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceCapacity {
    /// How many entities have a bucket with that limit.
    pub entities: u64,
    /// Their ceilings together, in tokens.
    pub capacity: i128,
    /// What is there now, in tokens, rounded down for each.
    pub available: i128,
}

impl ResourceCapacity {
    /// The part of the capacity that is in use, 0 to 1, or more in debt.
    pub fn utilization(&self) -> f64 {
        if self.capacity == 0 {
            return 0.0;
        }
        #[expect(clippy::cast_precision_loss, reason = "a figure to look at")]
        let ratio = (self.capacity - self.available) as f64 / self.capacity as f64;
        ratio
    }
}

impl RateLimiter {
    /// Every limit of an entity on a resource, and of the ancestors it takes from: what is there
    /// now, and how long until the given amounts would pass. Takes nothing.
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
        let now = self.clock().now();
        let chain = self.inner.call(self.inner.chain(&entity, &resource, now)).await??;
        let own = chain[0].limits();
        let unknown: Vec<&str> = amounts
            .iter()
            .map(|(name, _)| *name)
            .filter(|name| own.position(name).is_none())
            .collect();
        if !unknown.is_empty() {
            let names = unknown.join(", ");
            return Err(Error::UnknownLimits { names, entity, resource });
        }
        let keys: Vec<_> = chain.iter().map(|target| target.key().clone()).collect();
        let buckets = self.inner.call(self.store().peek(&keys, now)).await?;
        let mut statuses = Vec::new();
        for ((level, target), bucket) in chain.iter().enumerate().zip(buckets) {
            statuses.extend(statuses_of(level, target, bucket, &amounts, now)?);
        }
        Ok(statuses)
    }

    /// How long until the given amounts would pass, if nobody else takes any. Takes nothing.
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

    /// What each entity with a bucket on a resource has of a limit, by entity.
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
                let now = limiter.clock().now();
                let list = limiter.store().list_buckets(&query, &page);
                let page = limiter.inner.call(list).await?;
                Ok(page.filter_map(|stored| capacity_of(stored, &limit, now)))
            }
        }))
    }

    /// What all entities with a bucket on a resource have of a limit, added up page by page.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the name; an error of the store.
    pub async fn resource_capacity(
        &self,
        resource: &str,
        limit: &str,
    ) -> Result<ResourceCapacity, Error> {
        let mut total = ResourceCapacity::default();
        let mut pages = self.entity_capacities(resource, limit)?;
        while let Some(entities) = pages.next().await? {
            for entity in entities {
                total.entities += 1;
                total.capacity += i128::from(entity.capacity.whole_tokens());
                total.available += i128::from(entity.available.whole_tokens());
            }
        }
        Ok(total)
    }
}

/// A limit that is named twice counts with the sum, as in an acquire.
fn sums<'a>(amounts: &[(&'a str, u64)]) -> Result<Vec<(&'a str, Millitokens)>, Error> {
    let mut sums: Vec<(&str, u64)> = Vec::with_capacity(amounts.len());
    for (name, tokens) in amounts {
        match sums.iter_mut().find(|(known, _)| known == name) {
            Some((_, sum)) => *sum = sum.saturating_add(*tokens),
            None => sums.push((name, *tokens)),
        }
    }
    sums.into_iter().map(|(name, tokens)| Ok((name, amount(tokens)?))).collect()
}

fn capacity_of(stored: StoredBucket, limit: &str, now: Timestamp) -> Option<EntityCapacity> {
    if stored.expires_at.is_some_and(|expiry| expiry <= now) {
        return None;
    }
    let mut bucket = stored.bucket;
    bucket.refill(now);
    let (cell, rate) = bucket.cell(limit)?;
    Some(EntityCapacity {
        entity: stored.key.entity,
        capacity: rate.capacity(),
        available: cell.tokens,
    })
}

fn statuses_of(
    level: usize,
    target: &Target,
    bucket: Option<Bucket>,
    amounts: &[(&str, Millitokens)],
    now: Timestamp,
) -> Result<Vec<LimitStatus>, Error> {
    let mut bucket = bucket.unwrap_or_else(|| Bucket::full(Arc::clone(target.limits()), now));
    bucket.follow(target.limits(), now);
    bucket.refill(now);
    let mut statuses = Vec::new();
    for name in target.limits().names() {
        let at = bucket.limits().position(name.as_str()).expect("followed just now");
        let rate = bucket.limits().rates()[at];
        let asked = amounts.iter().find(|(asked, _)| *asked == name.as_str());
        let requested = asked.map_or(Millitokens::ZERO, |(_, amount)| *amount);
        if requested > rate.capacity() {
            return Err(Error::from(ExceedsCapacity {
                entity_id: target.key().entity.clone(),
                limit_name: name.clone(),
                requested,
                capacity: rate.capacity(),
            }));
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
