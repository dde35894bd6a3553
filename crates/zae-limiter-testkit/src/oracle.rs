//! What a store should do, on plain maps: the account arithmetic and nothing else.

use std::collections::BTreeMap;

use zae_limiter_core::account::{self, Account};
use zae_limiter_core::{
    Admission, Bucket, BucketKey, Overflow, Plan, Settlement, Target, Timestamp,
};

/// Buckets by their keys.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    accounts: BTreeMap<BucketKey, Account>,
}

impl Oracle {
    pub(crate) fn acquire(&mut self, plan: &Plan) -> Admission {
        let mut copies: Vec<Account> = Vec::new();
        for leg in &plan.legs {
            let account = self.accounts.get(leg.target.key()).cloned();
            copies.push(account.unwrap_or_else(|| Account::open(&leg.target, plan.now)));
        }
        let mut accounts: Vec<&mut Account> = copies.iter_mut().collect();
        let admission = account::admit(plan, &mut accounts, |_, _| {});
        // A refused plan changes nothing: its copies are thrown away.
        if matches!(admission, Admission::Taken(_)) {
            for (leg, account) in plan.legs.iter().zip(copies) {
                self.accounts.insert(leg.target.key().clone(), account);
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
        let mut account = self.accounts.get(key).cloned();
        account::settle(settlement, &mut account, now, |_| {})?;
        if let Some(account) = account {
            self.accounts.insert(key.clone(), account);
        }
        Ok(())
    }

    pub(crate) fn reconfigure(&mut self, target: &Target, now: Timestamp) {
        if let Some(account) = self.accounts.get_mut(target.key())
            && !account.is_expired(now)
        {
            account.reconfigure(target, now);
        }
    }

    pub(crate) fn delete(&mut self, key: &BucketKey) {
        self.accounts.remove(key);
    }

    /// The bucket, paid out up to `now`.
    pub(crate) fn peek(&self, key: &BucketKey, now: Timestamp) -> Option<Bucket> {
        let account = self.accounts.get(key).filter(|account| !account.is_expired(now))?;
        let mut bucket = account.bucket.clone();
        bucket.refill(now);
        Some(bucket)
    }
}
