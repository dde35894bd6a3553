//! Lanes: one for each part of a bucket in use, with what is known of it and who waits for it.
//!
//! While a write to a part is under way, later requests wait in its lane and go together in the
//! next write. What the last answer said of the bucket is remembered, so that the next write needs
//! no read, and a request that cannot be admitted yet needs no write.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hashbrown::{Equivalent, HashMap};
use smallvec::SmallVec;
use tokio::sync::oneshot;
use zae_limiter_core::{BucketKey, LegTaken, LimitStatus, StoreError, Timestamp};
use zae_limiter_schema::BucketItemKey;
use zae_limiter_schema::bucket::WRITES_MAX;

use crate::division::Division;
use crate::round::{Request, State};

/// How many parts the map of lanes has, so that callers do not wait for each other.
const PARTS: usize = 64;

/// How long writes to a part are held up for each that it could take less than a quiet one.
const PAUSE_PER_WRITE: Duration = Duration::from_micros(80);

/// How long for each that came too late, because others had moved the refill time. It costs as much
/// as one that counts.
const PAUSE_PER_LOST: Duration = Duration::from_millis(4);

/// How long they are held up at most.
const PAUSE_MAX: Duration = Duration::from_millis(60);

/// What a caller is told about its leg.
#[derive(Debug)]
pub(crate) enum Told {
    Taken(LegTaken),
    Settled,
    Refused(Vec<LimitStatus>),
}

/// Somebody who waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) request: Request,
    pub(crate) now: Timestamp,
    /// Nobody reads the answer of what is given back behind somebody's back.
    pub(crate) answer: Option<oneshot::Sender<Result<Told, StoreError>>>,
    /// The parts that could not do it.
    pub(crate) tried: SmallVec<[u32; 4]>,
    /// How often it was sent on because a part is not there, or too busy.
    pub(crate) moves: u32,
    /// Some of it is done: whoever is told that the rest was not must not do all of it again.
    pub(crate) is_begun: bool,
}

impl Waiting {
    pub(crate) fn new(
        request: Request,
        now: Timestamp,
        answer: Option<oneshot::Sender<Result<Told, StoreError>>>,
    ) -> Self {
        Self { request, now, answer, tried: SmallVec::new(), moves: 0, is_begun: false }
    }

    /// Whether whoever asked for tokens has gone away. A settlement is carried out all the same.
    pub(crate) fn is_abandoned(&self) -> bool {
        matches!(self.request, Request::Take(_))
            && self.answer.as_ref().is_some_and(oneshot::Sender::is_closed)
    }
}

/// One part of a bucket.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) key: BucketItemKey,
    // A std mutex: it is never held across an await.
    inside: Mutex<Inside>,
}

#[derive(Debug, Default)]
pub(crate) struct Inside {
    /// What the last answer said, and when.
    pub(crate) known: Option<(State, Timestamp)>,
    /// How often that has changed.
    pub(crate) learnt: u64,
    pub(crate) waiting: VecDeque<Waiting>,
    /// Somebody is at work on the lane and will look at `waiting` again.
    pub(crate) busy: bool,
    /// How many writes came too late since the last pause.
    pub(crate) lost: u32,
    /// In the first part's lane: what is known of the others. Few buckets have any.
    pub(crate) division: Option<Box<Division>>,
}

impl Lane {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inside {
    /// Takes note of what an answer said, or that it is not known any more.
    pub(crate) fn know(&mut self, known: Option<(State, Timestamp)>) {
        self.known = known;
        self.learnt += 1;
    }

    /// What is known, if it was learnt less than `trust` ago.
    pub(crate) fn fresh(&self, now: Timestamp, trust: Duration) -> Option<&State> {
        let (state, learnt_at) = self.known.as_ref()?;
        let age = Duration::from_millis(now.millis_since(*learnt_at));
        (age < trust).then_some(state)
    }

    /// How long those who wait now wait for others to join them, because the part is written more than
    /// a partition bears, or others are ahead of us. The more, the longer: processes that all do so
    /// settle where it bears them.
    pub(crate) fn pause(&mut self) -> Option<Duration> {
        let lost = std::mem::take(&mut self.lost);
        if self.waiting.is_empty() {
            // Alone, nobody is helped by waiting.
            return None;
        }
        let short = match &self.known {
            Some((State::Item(item), learnt_at)) => WRITES_MAX - item.writes_left(*learnt_at),
            _ => 0,
        };
        let short = u32::try_from(short).unwrap_or(0);
        let pause = PAUSE_PER_WRITE * short + PAUSE_PER_LOST * lost;
        (!pause.is_zero()).then_some(pause.min(PAUSE_MAX))
    }
}

/// The name of a lane.
#[derive(Clone, Copy, Hash)]
struct Name<'a> {
    bucket: &'a BucketKey,
    shard: u32,
}

impl Equivalent<BucketItemKey> for Name<'_> {
    fn equivalent(&self, key: &BucketItemKey) -> bool {
        self.shard == key.shard && *self.bucket == key.bucket
    }
}

type Part = HashMap<BucketItemKey, Arc<Lane>, foldhash::fast::RandomState>;

/// All lanes of a store.
#[derive(Debug)]
pub(crate) struct Lanes {
    parts: Box<[Mutex<Part>]>,
    part_max: usize,
}

impl Lanes {
    /// Room for so many buckets to be remembered.
    pub(crate) fn new(remembered_max: usize) -> Self {
        let parts = (0..PARTS).map(|_| Mutex::default()).collect();
        Self { parts, part_max: remembered_max.div_ceil(PARTS).max(1) }
    }

    fn part(&self, name: Name<'_>) -> MutexGuard<'_, Part> {
        use std::hash::BuildHasher;
        // Any hash will do that is the same for the same key within this process.
        static HASHING: std::sync::LazyLock<foldhash::fast::RandomState> =
            std::sync::LazyLock::new(Default::default);
        let part = usize::try_from(HASHING.hash_one(name) % PARTS as u64).unwrap_or(0);
        self.parts[part].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what is known of a bucket that was deleted.
    pub(crate) fn forget(&self, bucket: &BucketKey) {
        let Some(first) = self.find(bucket, 0) else { return };
        let division = {
            let mut inside = first.lock();
            inside.know(None);
            inside.division.take()
        };
        for shard in 1..division.map_or(1, |division| division.count) {
            if let Some(lane) = self.find(bucket, shard) {
                lane.lock().know(None);
            }
        }
    }

    /// The lane of a part, if there is one.
    pub(crate) fn find(&self, bucket: &BucketKey, shard: u32) -> Option<Arc<Lane>> {
        let name = Name { bucket, shard };
        self.part(name).get(&name).cloned()
    }

    /// The lane of a part.
    pub(crate) fn get(&self, bucket: &BucketKey, shard: u32) -> Arc<Lane> {
        let name = Name { bucket, shard };
        let mut part = self.part(name);
        if let Some(lane) = part.get(&name) {
            return Arc::clone(lane);
        }
        if part.len() >= self.part_max {
            forget_some(&mut part, self.part_max / 8 + 1);
        }
        let key = BucketItemKey { bucket: bucket.clone(), shard };
        let lane = Arc::new(Lane { key: key.clone(), inside: Mutex::default() });
        part.insert(key, Arc::clone(&lane));
        lane
    }
}

/// Makes room. A lane that anybody holds stays: two lanes for one bucket would write past each
/// other, which is safe but costs.
fn forget_some(part: &mut Part, count: usize) {
    let mut left = count;
    part.retain(|_, lane| {
        let idle = Arc::strong_count(lane) == 1 && left > 0;
        left -= usize::from(idle);
        !idle
    });
}
