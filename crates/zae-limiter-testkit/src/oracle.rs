//! The oracle: the reference behaviour of a store, on a plain map of bucket states.

use std::collections::BTreeMap;

use zae_limiter_core::bucket_state::{self, BucketState};
use zae_limiter_core::{
    Admission, Bucket, BucketKey, Overflow, Plan, Settlement, Target, Timestamp,
};

/// Buckets by their keys.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    buckets: BTreeMap<BucketKey, BucketState>,
}

impl Oracle {
    pub(crate) fn acquire(&mut self, plan: &Plan) -> Admission {
        let mut copies: Vec<BucketState> = Vec::new();
        for leg in &plan.legs {
            let state = self.buckets.get(leg.target.key()).cloned();
            copies.push(state.unwrap_or_else(|| BucketState::open(&leg.target, plan.now)));
        }
        let mut buckets: Vec<&mut BucketState> = copies.iter_mut().collect();
        let admission = bucket_state::admit(plan, &mut buckets, |_, _| {});
        // A refused plan changes nothing: its copies are dropped.
        if matches!(admission, Admission::Taken(_)) {
            for (leg, state) in plan.legs.iter().zip(copies) {
                self.buckets.insert(leg.target.key().clone(), state);
            }
        }
        admission
    }

    pub(crate) fn settle(
        &mut self,
        settlement: &Settlement,
        now: Timestamp,
    ) -> Result<(), Overflow> {
        let key = settlement.target.key();
        let mut state = self.buckets.get(key).cloned();
        bucket_state::settle(settlement, &mut state, now, |_| {})?;
        if let Some(state) = state {
            self.buckets.insert(key.clone(), state);
        }
        Ok(())
    }

    pub(crate) fn reconfigure(&mut self, target: &Target, now: Timestamp) {
        if let Some(state) = self.buckets.get_mut(target.key())
            && !state.is_expired(now)
        {
            state.reconfigure(target, now);
        }
    }

    pub(crate) fn delete(&mut self, key: &BucketKey) {
        self.buckets.remove(key);
    }

    /// The bucket, refilled up to `now`.
    pub(crate) fn peek(&self, key: &BucketKey, now: Timestamp) -> Option<Bucket> {
        let state = self.buckets.get(key).filter(|state| !state.is_expired(now))?;
        let mut bucket = state.bucket.clone();
        bucket.refill(now);
        Some(bucket)
    }
}
