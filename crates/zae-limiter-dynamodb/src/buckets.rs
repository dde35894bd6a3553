//! The machines of all buckets in use. When there are too many, idle ones are evicted.

use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;
use zae_limiter_core::BucketKey;

use crate::bucket::machine::BucketMachine;
use crate::bucket::message::Caller;
use crate::options::DynamoOptions;

/// The number of stripes of the map, each with its own lock.
const STRIPES: usize = 64;

/// Seeded by the store: different in every process, and the same in every run of a simulation.
type Hashing = foldhash::fast::FixedState;
type Stripe<C> = HashMap<BucketKey, Arc<Bucket<C>>, Hashing>;

/// A bucket in use.
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

    /// The bucket, if it is in use.
    pub(crate) fn find(&self, key: &BucketKey) -> Option<Arc<Bucket<C>>> {
        self.stripe(key).get(key).cloned()
    }

    /// The bucket, which is in use from now on.
    pub(crate) fn get(&self, key: &BucketKey) -> Arc<Bucket<C>> {
        let mut stripe = self.stripe(key);
        if let Some(bucket) = stripe.get(key) {
            return Arc::clone(bucket);
        }
        let most = self.options.remembered_buckets.div_ceil(STRIPES).max(1);
        if stripe.len() >= most {
            let mut left = most / 8 + 1;
            // A bucket with other references stays: two machines for one bucket would be safe, but their
            // writes would fail on each other's conditions.
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
    /// Locks the machine. One that has panicked is replaced by an empty one, and the callers that waited for
    /// it get an error.
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
