//! The buckets in use, each with its machine. Where there are too many, some that nobody waits for make room.

use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;
use zae_limiter_core::BucketKey;

use crate::bucket::machine::BucketMachine;
use crate::bucket::message::Caller;
use crate::options::DynamoOptions;

/// How many stripes the map has, so that callers do not wait for each other.
const STRIPES: usize = 64;

/// By the store's seed: another one in every process, and the same in every run of a simulation.
type Hashing = foldhash::fast::FixedState;
type Stripe<C> = HashMap<BucketKey, Arc<Bucket<C>>, Hashing>;

/// One bucket in use.
#[derive(Debug)]
pub(crate) struct Bucket<C> {
    // A std mutex: it is never held across an await.
    machine: Mutex<BucketMachine<C>>,
    pub(crate) key: BucketKey,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Buckets<C> {
    options: Arc<DynamoOptions>,
    stripes: Box<[Mutex<Stripe<C>>]>,
}

impl<C: Caller> Buckets<C> {
    pub(crate) fn new(options: Arc<DynamoOptions>) -> Self {
        let stripe = || Mutex::new(Stripe::with_hasher(Hashing::with_seed(!options.seed)));
        let stripes = (0..STRIPES).map(|_| stripe()).collect();
        Self { options, stripes }
    }

    fn stripe(&self, key: &BucketKey) -> MutexGuard<'_, Stripe<C>> {
        let hash = Hashing::with_seed(self.options.seed).hash_one(key);
        let at = usize::try_from(hash % STRIPES as u64).unwrap_or(0);
        self.stripes[at].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A bucket that is in use.
    pub(crate) fn find(&self, key: &BucketKey) -> Option<Arc<Bucket<C>>> {
        self.stripe(key).get(key).cloned()
    }

    /// A bucket, in use from here on.
    pub(crate) fn get(&self, key: &BucketKey) -> Arc<Bucket<C>> {
        let mut stripe = self.stripe(key);
        if let Some(bucket) = stripe.get(key) {
            return Arc::clone(bucket);
        }
        let most = self.options.remembered_buckets.div_ceil(STRIPES).max(1);
        if stripe.len() >= most {
            let mut left = most / 8 + 1;
            // A bucket that anybody holds stays: two machines for one bucket would write past each
            // other, which is safe but costs.
            stripe.retain(|_, bucket| {
                let is_idle = Arc::strong_count(bucket) == 1 && left > 0;
                left -= usize::from(is_idle);
                !is_idle
            });
        }
        let machine = BucketMachine::new(key.clone(), Arc::clone(&self.options), 0);
        let bucket = Arc::new(Bucket { machine: Mutex::new(machine), key: key.clone() });
        stripe.insert(key.clone(), Arc::clone(&bucket));
        bucket
    }
}

impl<C: Caller> Bucket<C> {
    /// The machine. One that has panicked is replaced by a new one, which knows nothing; those who
    /// waited for the old one get to know that their requests are gone.
    pub(crate) fn lock(&self) -> MutexGuard<'_, BucketMachine<C>> {
        match self.machine.lock() {
            Ok(machine) => machine,
            Err(poisoned) => {
                self.machine.clear_poison();
                let mut machine = poisoned.into_inner();
                *machine = machine.anew();
                machine
            }
        }
    }
}
