//! Which shards of a stream can be read now, and which of them this process should take.

use std::collections::BTreeMap;
use std::time::Duration;

use zae_limiter_schema::records::checkpoint::Checkpoint;

/// A shard of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// What it is called.
    pub id: String,
    /// The shard that it goes on from.
    pub parent: Option<String>,
}

/// The shards that can be read: those that are not done and whose parents are, or are gone from the
/// stream. A child read before its parent would see changes of an item out of order.
pub(crate) fn readable<'a>(
    shards: &'a [Shard],
    checkpoints: &BTreeMap<String, Checkpoint>,
) -> Vec<&'a Shard> {
    let is_done = |id: &String| checkpoints.get(id).is_some_and(|checkpoint| checkpoint.done);
    let waits = |shard: &&Shard| {
        let is_there = |parent: &&String| shards.iter().any(|shard| shard.id == **parent);
        shard.parent.as_ref().filter(is_there).is_some_and(|parent| !is_done(parent))
    };
    shards.iter().filter(|shard| !is_done(&shard.id) && !waits(shard)).collect()
}

/// When each beat was last seen to go on, by this process's stopwatch.
#[derive(Debug)]
pub(crate) struct Beats {
    seen: BTreeMap<String, Beat>,
    /// How long a beat may stand still before its owner counts as gone.
    gone_after: Duration,
}

#[derive(Debug)]
struct Beat {
    owner: Option<String>,
    number: i64,
    since: Duration,
    /// Whether it was seen to go on under this owner.
    goes_on: bool,
}

impl Beats {
    pub(crate) fn new(gone_after: Duration) -> Self {
        Self { seen: BTreeMap::new(), gone_after }
    }

    /// Takes note of how the records are now.
    pub(crate) fn see(&mut self, checkpoints: &BTreeMap<String, Checkpoint>, now: Duration) {
        self.seen.retain(|shard, _| checkpoints.contains_key(shard));
        for (shard, checkpoint) in checkpoints {
            let (owner, number) = (checkpoint.owner.clone(), checkpoint.beat);
            match self.seen.get_mut(shard) {
                Some(beat) if beat.owner == owner && beat.number == number => {}
                Some(beat) if beat.owner == owner => {
                    (beat.number, beat.since, beat.goes_on) = (number, now, true);
                }
                _ => {
                    let beat = Beat { owner, number, since: now, goes_on: false };
                    self.seen.insert(shard.clone(), beat);
                }
            }
        }
    }

    /// Whether somebody holds the shard and may live.
    fn is_held(&self, shard: &str, now: Duration) -> bool {
        self.seen.get(shard).is_some_and(|beat| {
            beat.owner.is_some() && now.saturating_sub(beat.since) < self.gone_after
        })
    }

    /// Whether somebody holds the shard who has given a sign of life since it was first looked at.
    pub(crate) fn is_alive(&self, shard: &str, now: Duration) -> bool {
        self.is_held(shard, now) && self.seen.get(shard).is_some_and(|beat| beat.goes_on)
    }
}

/// The shards that this process should take now: free ones up to its fair share, and else one of
/// somebody who has too many.
pub(crate) fn claims<'a>(
    readable: &[&'a Shard],
    checkpoints: &BTreeMap<String, Checkpoint>,
    beats: &Beats,
    me: &str,
    now: Duration,
) -> Vec<&'a Shard> {
    let owner = |shard: &Shard| checkpoints.get(&shard.id).and_then(|one| one.owner.as_deref());
    let mut held: BTreeMap<&str, Vec<&'a Shard>> = BTreeMap::from([(me, Vec::new())]);
    let mut free = Vec::new();
    for shard in readable {
        match owner(shard) {
            Some(owner) if owner == me || beats.is_held(&shard.id, now) => {
                held.entry(owner).or_default().push(shard);
            }
            _ => free.push(*shard),
        }
    }
    let share = readable.len().div_ceil(held.len());
    let mine = held[me].len();
    free.truncate(share.saturating_sub(mine));
    if !free.is_empty() || mine >= share {
        return free;
    }
    // One at a time: everybody looks again, and nobody is left with too few.
    let richest = held.values().max_by_key(|shards| shards.len());
    let spare = richest.filter(|shards| shards.len() > share || shards.len() > mine + 1);
    spare.and_then(|shards| shards.last().copied()).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GONE_AFTER: Duration = Duration::from_secs(20);

    fn shard(id: &str, parent: Option<&str>) -> Shard {
        Shard { id: id.to_owned(), parent: parent.map(str::to_owned) }
    }

    fn checkpoint(owner: Option<&str>, beat: i64, done: bool) -> Checkpoint {
        Checkpoint { owner: owner.map(str::to_owned), beat, done, ..Checkpoint::default() }
    }

    type Checkpoints<'a> = &'a [(&'a str, Checkpoint)];

    fn map(checkpoints: Checkpoints<'_>) -> BTreeMap<String, Checkpoint> {
        checkpoints.iter().map(|(id, one)| ((*id).to_owned(), one.clone())).collect()
    }

    #[test]
    fn parents_are_read_before_their_children() {
        let shards = [
            shard("old", Some("trimmed")),
            shard("left", Some("old")),
            shard("right", Some("old")),
            shard("leaf", Some("left")),
        ];
        let check = |done: &[&str], wanted: &[&str]| {
            let done: Vec<_> = done.iter().map(|id| (*id, checkpoint(None, 1, true))).collect();
            let found = readable(&shards, &map(&done));
            let found: Vec<&str> = found.iter().map(|shard| shard.id.as_str()).collect();
            assert_eq!(found, wanted, "{done:?}");
        };
        check(&[], &["old"]);
        check(&["old"], &["left", "right"]);
        check(&["old", "left"], &["right", "leaf"]);
        check(&["old", "left", "right", "leaf"], &[]);
    }

    /// Which of the shards a to d are taken by `me`.
    fn taken(checkpoints: Checkpoints<'_>, still: Duration) -> Vec<String> {
        let shards = ["a", "b", "c", "d"].map(|id| shard(id, None));
        let readable: Vec<&Shard> = shards.iter().collect();
        let checkpoints = map(checkpoints);
        let mut beats = Beats::new(GONE_AFTER);
        beats.see(&checkpoints, Duration::ZERO);
        let taken = claims(&readable, &checkpoints, &beats, "me", still);
        taken.into_iter().map(|shard| shard.id.clone()).collect()
    }

    #[test]
    fn shards_are_shared_out() {
        let of = |owner| checkpoint(Some(owner), 1, false);
        let soon = Duration::from_secs(1);
        // Alone: all of them. Beside somebody: half of them, free ones first.
        assert_eq!(taken(&[], soon), ["a", "b", "c", "d"]);
        assert_eq!(taken(&[("a", of("you"))], soon), ["b", "c"]);
        assert_eq!(taken(&[("a", of("you")), ("b", of("me"))], soon), ["c"]);
        // Nothing is free: one of somebody who has too many, and none where it is even.
        let all = ["a", "b", "c", "d"].map(|id| (id, of("you")));
        assert_eq!(taken(&all, soon), ["d"]);
        let even = [("a", of("you")), ("b", of("you")), ("c", of("me")), ("d", of("me"))];
        assert!(taken(&even, soon).is_empty());
        // Given back, or held by somebody whose beat stands still.
        assert_eq!(taken(&[("a", checkpoint(None, 7, false))], soon).len(), 4);
        assert_eq!(taken(&all, GONE_AFTER).len(), 4);
    }

    #[test]
    fn a_beat_that_goes_on_is_that_of_somebody_who_lives() {
        let mut beats = Beats::new(GONE_AFTER);
        beats.see(&map(&[("a", checkpoint(Some("you"), 1, false))]), Duration::ZERO);
        assert!(beats.is_held("a", Duration::ZERO) && !beats.is_alive("a", Duration::ZERO));
        beats.see(&map(&[("a", checkpoint(Some("you"), 2, false))]), GONE_AFTER);
        assert!(beats.is_held("a", GONE_AFTER + Duration::from_secs(1)));
        assert!(beats.is_alive("a", GONE_AFTER));
        assert!(!beats.is_held("a", GONE_AFTER * 2));
    }
}
