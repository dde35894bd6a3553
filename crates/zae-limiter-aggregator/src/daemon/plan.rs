//! Decides which stream shards can be read, and which of them this daemon should claim.

use std::collections::BTreeMap;
use std::time::Duration;

use zae_limiter_schema::records::checkpoint::Checkpoint;

/// A shard of the change stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamShard {
    /// Its id, which DynamoDB assigns.
    pub id: String,
    /// The id of the stream shard that it continues.
    pub parent: Option<String>,
}

/// The stream shards that can be read: those that are not done, and whose parent is done or no
/// longer exists. Reading a child before its parent would reorder the changes of an item.
pub(crate) fn readable<'a>(
    shards: &'a [StreamShard],
    checkpoints: &BTreeMap<String, Checkpoint>,
) -> Vec<&'a StreamShard> {
    let is_done = |id: &String| checkpoints.get(id).is_some_and(|checkpoint| checkpoint.done);
    let waits = |shard: &&StreamShard| {
        let is_there = |parent: &&String| shards.iter().any(|shard| shard.id == **parent);
        shard.parent.as_ref().filter(is_there).is_some_and(|parent| !is_done(parent))
    };
    shards.iter().filter(|shard| !is_done(&shard.id) && !waits(shard)).collect()
}

/// The last heartbeat of each stream shard's owner, by this process's stopwatch.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    seen: BTreeMap<String, Heartbeat>,
    /// How long a heartbeat may stay unchanged before the owner counts as crashed.
    takeover_after: Duration,
}

#[derive(Debug)]
struct Heartbeat {
    owner: Option<String>,
    /// The counter in the checkpoint, which the owner raises.
    number: i64,
    /// When this process first saw that number.
    since: Duration,
    /// Whether this process has seen the owner raise it.
    has_advanced: bool,
}

impl Heartbeats {
    pub(crate) fn new(takeover_after: Duration) -> Self {
        Self { seen: BTreeMap::new(), takeover_after }
    }

    /// Records the heartbeats in the checkpoints as of `now`.
    pub(crate) fn observe(&mut self, checkpoints: &BTreeMap<String, Checkpoint>, now: Duration) {
        self.seen.retain(|shard, _| checkpoints.contains_key(shard));
        for (shard, checkpoint) in checkpoints {
            let (owner, number) = (checkpoint.owner.clone(), checkpoint.beat);
            match self.seen.get_mut(shard) {
                Some(beat) if beat.owner == owner && beat.number == number => {}
                Some(beat) if beat.owner == owner => {
                    (beat.number, beat.since, beat.has_advanced) = (number, now, true);
                }
                _ => {
                    let beat = Heartbeat { owner, number, since: now, has_advanced: false };
                    self.seen.insert(shard.clone(), beat);
                }
            }
        }
    }

    /// Whether a daemon holds the stream shard and has not timed out.
    fn is_held(&self, shard: &str, now: Duration) -> bool {
        self.seen.get(shard).is_some_and(|beat| {
            beat.owner.is_some() && now.saturating_sub(beat.since) < self.takeover_after
        })
    }

    /// Whether a daemon holds the stream shard and this process has seen its heartbeat advance.
    pub(crate) fn is_alive(&self, shard: &str, now: Duration) -> bool {
        self.is_held(shard, now) && self.seen.get(shard).is_some_and(|beat| beat.has_advanced)
    }
}

/// The stream shards that this daemon should claim now: free ones up to its fair share. If none is
/// free, one of a daemon that has too many.
pub(crate) fn claims<'a>(
    readable: &[&'a StreamShard],
    checkpoints: &BTreeMap<String, Checkpoint>,
    heartbeats: &Heartbeats,
    me: &str,
    now: Duration,
) -> Vec<&'a StreamShard> {
    let owner =
        |shard: &StreamShard| checkpoints.get(&shard.id).and_then(|one| one.owner.as_deref());
    let mut held: BTreeMap<&str, Vec<&'a StreamShard>> = BTreeMap::from([(me, Vec::new())]);
    let mut free = Vec::new();
    for shard in readable {
        match owner(shard) {
            Some(owner) if owner == me || heartbeats.is_held(&shard.id, now) => {
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
    // One at a time: all daemons look again soon, and none ends up with too few.
    let busiest = held.values().max_by_key(|shards| shards.len());
    let spare = busiest.filter(|shards| shards.len() > share || shards.len() > mine + 1);
    spare.and_then(|shards| shards.last().copied()).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAKEOVER_AFTER: Duration = Duration::from_secs(20);

    fn shard(id: &str, parent: Option<&str>) -> StreamShard {
        StreamShard { id: id.to_owned(), parent: parent.map(str::to_owned) }
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

    /// Which of the stream shards a to d the daemon `me` claims.
    fn taken(checkpoints: Checkpoints<'_>, still: Duration) -> Vec<String> {
        let shards = ["a", "b", "c", "d"].map(|id| shard(id, None));
        let readable: Vec<&StreamShard> = shards.iter().collect();
        let checkpoints = map(checkpoints);
        let mut beats = Heartbeats::new(TAKEOVER_AFTER);
        beats.observe(&checkpoints, Duration::ZERO);
        let taken = claims(&readable, &checkpoints, &beats, "me", still);
        taken.into_iter().map(|shard| shard.id.clone()).collect()
    }

    #[test]
    fn daemons_share_the_stream_shards_evenly() {
        let of = |owner| checkpoint(Some(owner), 1, false);
        let soon = Duration::from_secs(1);
        // Alone it claims all. Next to another daemon it claims half, free ones first.
        assert_eq!(taken(&[], soon), ["a", "b", "c", "d"]);
        assert_eq!(taken(&[("a", of("you"))], soon), ["b", "c"]);
        assert_eq!(taken(&[("a", of("you")), ("b", of("me"))], soon), ["c"]);
        // None is free: it claims one of a daemon that has too many, and none where it is even.
        let all = ["a", "b", "c", "d"].map(|id| (id, of("you")));
        assert_eq!(taken(&all, soon), ["d"]);
        let even = [("a", of("you")), ("b", of("you")), ("c", of("me")), ("d", of("me"))];
        assert!(taken(&even, soon).is_empty());
        // Released ones, and those of an owner whose heartbeat has stopped, are free.
        assert_eq!(taken(&[("a", checkpoint(None, 7, false))], soon).len(), 4);
        assert_eq!(taken(&all, TAKEOVER_AFTER).len(), 4);
    }

    #[test]
    fn an_owner_is_alive_while_its_heartbeat_advances() {
        let mut beats = Heartbeats::new(TAKEOVER_AFTER);
        beats.observe(&map(&[("a", checkpoint(Some("you"), 1, false))]), Duration::ZERO);
        assert!(beats.is_held("a", Duration::ZERO) && !beats.is_alive("a", Duration::ZERO));
        beats.observe(&map(&[("a", checkpoint(Some("you"), 2, false))]), TAKEOVER_AFTER);
        assert!(beats.is_held("a", TAKEOVER_AFTER + Duration::from_secs(1)));
        assert!(beats.is_alive("a", TAKEOVER_AFTER));
        assert!(!beats.is_held("a", TAKEOVER_AFTER * 2));
    }
}
