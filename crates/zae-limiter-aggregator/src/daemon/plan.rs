//! Decides which stream shards can be read, and which of them this daemon should claim.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use zae_limiter_core::Timestamp;
use zae_limiter_schema::records::checkpoint::Checkpoint;

/// The time for which a stream keeps its records, less the difference of clocks.
const RETENTION: Duration = Duration::from_secs(86_400 - 300);

/// An hour: how soon after a daemon has found a stream shard it is read.
const READ_SOON: Duration = Duration::from_secs(3_600);

/// A shard of the change stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamShard {
    /// Its id, which DynamoDB assigns.
    pub id: String,
    /// The id of the stream shard that it continues.
    pub parent: Option<String>,
    /// Whether it gets more records.
    pub end: End,
}

/// The end of a stream shard, as far as the stream tells it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum End {
    /// It gets more records.
    #[default]
    Open,
    /// The record with this sequence number is the last one. Some emulators say so of open stream shards, too, and
    /// mean the last one at present: only a page without a next one ends a stream shard.
    After(String),
    /// The stream no longer lists it.
    Unlisted,
}

/// Adds the stream shards that some daemon has not finished and that the stream no longer lists. Whoever claims one
/// finds out whether its records are gone.
pub(crate) fn with_unlisted(
    mut shards: Vec<StreamShard>,
    checkpoints: &BTreeMap<String, Checkpoint>,
    label: &str,
) -> Vec<StreamShard> {
    let listed: BTreeSet<String> = shards.iter().map(|shard| shard.id.clone()).collect();
    // A later stream is none of this daemon's business.
    let is_open = |one: &&Checkpoint| !one.done && *one.stream <= *label;
    let open = checkpoints.values().filter(is_open).map(|one| one.shard.clone());
    let unlisted = open.filter(|id| !listed.contains(id));
    shards.extend(unlisted.map(|id| StreamShard { id, parent: None, end: End::Unlisted }));
    shards
}

/// The stream shards that can be read: those that are not done, and whose parent is done or no
/// longer exists. Reading a child before its parent would reorder the changes of an item. A parent that is read to its
/// end need not be done: its owner may still archive audit events. `is_read` says which ones this daemon has read, and
/// the checkpoints which ones others have.
pub(crate) fn readable<'a>(
    shards: &'a [StreamShard],
    checkpoints: &BTreeMap<String, Checkpoint>,
    label: &str,
    is_read: impl Fn(&str) -> bool,
) -> Vec<&'a StreamShard> {
    let is_done = |id: &String| is_done(checkpoints, id, label);
    let waits = |shard: &&StreamShard| {
        let parent = |id: &String| shards.iter().find(|shard| shard.id == *id);
        let parent = shard.parent.as_ref().and_then(parent);
        let is_over = |parent: &StreamShard| {
            is_done(&parent.id) || is_read(&parent.id) || has_read(checkpoints, parent, label)
        };
        parent.is_some_and(|parent| !is_over(parent))
    };
    shards.iter().filter(|shard| !is_done(&shard.id) && !waits(shard)).collect()
}

/// A position in an earlier stream of the table does not count.
fn is_done(checkpoints: &BTreeMap<String, Checkpoint>, id: &str, label: &str) -> bool {
    checkpoints.get(id).is_some_and(|checkpoint| checkpoint.done && checkpoint.stream == label)
}

/// Whether all changes of a stream shard are processed. One that the stream does not list may be of an earlier stream.
pub(crate) fn has_read(
    checkpoints: &BTreeMap<String, Checkpoint>,
    shard: &StreamShard,
    label: &str,
) -> bool {
    let is_it = |one: &Checkpoint| one.stream == label || shard.end == End::Unlisted;
    checkpoints.get(&shard.id).is_some_and(|one| one.read && is_it(one))
}

/// The checkpoint of a stream shard that has none. If it continues one that the stream no longer lists, and no daemon was
/// there for longer than the stream keeps its records, some of its own may be gone: then it begins when they stopped.
pub(crate) fn new_checkpoint(
    shard: &StreamShard,
    shards: &[StreamShard],
    checkpoints: &BTreeMap<String, Checkpoint>,
    label: &str,
    now: Timestamp,
) -> Checkpoint {
    let mut new = Checkpoint { stream: label.to_owned(), ..Checkpoint::default() };
    (new.shard, new.seen_at) = (shard.id.clone(), Some(now));
    let is_listed = |id: &String| shards.iter().any(|one| one.id == *id);
    let last_there = checkpoints.values().filter_map(|one| one.seen_at).max();
    if !shard.parent.as_ref().is_some_and(is_listed) && has_missed(last_there, now) {
        let parent = shard.parent.as_ref().and_then(|parent| checkpoints.get(parent));
        // If no daemon has seen the parent, it is not known which one that continued.
        let any = || checkpoints.values().map(|one| one.read_to).min().flatten();
        let read_to = parent.map_or_else(any, |parent| parent.read_to);
        (new.seen_at, new.read_to) = (last_there, read_to);
    }
    new
}

/// The checkpoint of a stream shard that nobody reads yet. It has begun since a daemon was last there, and may have
/// records that old, as far as the stream keeps them. If nobody reads it for long, they are gone.
pub(crate) fn waiting_checkpoint(
    shard: &StreamShard,
    shards: &[StreamShard],
    checkpoints: &BTreeMap<String, Checkpoint>,
    label: &str,
    now: Timestamp,
) -> Checkpoint {
    let mut new = new_checkpoint(shard, shards, checkpoints, label, now);
    if new.seen_at == Some(now)
        && let Some(at) = checkpoints.values().filter_map(|one| one.seen_at).max()
    {
        // One that is read soon after an outage has lost nothing yet.
        let oldest = i64::try_from((RETENTION - READ_SOON).as_millis()).expect("less than a day");
        let oldest = Timestamp::from_millis(now.as_millis().saturating_sub(oldest));
        new.seen_at = Some(at.max(oldest));
    }
    new
}

/// A time before the first record of a stream shard: that of its parent's last one, if that is known.
pub(crate) fn begun_after(
    shard: &StreamShard,
    checkpoints: &BTreeMap<String, Checkpoint>,
) -> Option<Timestamp> {
    let parent = checkpoints.get(shard.parent.as_ref()?)?;
    parent.read_to.filter(|_| parent.done)
}

/// Whether the stream has deleted records since then.
pub(crate) fn has_missed(seen_at: Option<Timestamp>, now: Timestamp) -> bool {
    seen_at.is_some_and(|at| at.saturating_add(RETENTION) < now)
}

/// Whether a daemon of this table archives audit events. After its last heartbeat that counts for as long as the stream
/// may have events that it left.
pub(crate) fn is_archived(checkpoints: &BTreeMap<String, Checkpoint>, now: Timestamp) -> bool {
    let last = checkpoints.values().filter_map(|one| one.archived_at).max();
    last.is_some_and(|at| now <= at.saturating_add(RETENTION.saturating_mul(2)))
}

/// The last heartbeat of each stream shard's owner, by this process's stopwatch.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    seen: BTreeMap<String, Heartbeat>,
    /// How long a heartbeat may stay unchanged before the owner counts as crashed, unless the owner needs longer.
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
    /// The owner's own takeover time: it sends heartbeats by that.
    takeover_after: Option<Duration>,
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
                    let takeover_after = checkpoint.takeover_after;
                    let beat = Heartbeat {
                        owner,
                        number,
                        since: now,
                        has_advanced: false,
                        takeover_after,
                    };
                    self.seen.insert(shard.clone(), beat);
                }
            }
        }
    }

    /// Whether a daemon holds the stream shard and has not timed out.
    fn is_held(&self, shard: &str, now: Duration) -> bool {
        self.seen.get(shard).is_some_and(|beat| {
            let takeover_after = beat.takeover_after.unwrap_or_default().max(self.takeover_after);
            beat.owner.is_some() && now.saturating_sub(beat.since) < takeover_after
        })
    }

    /// Whether a daemon holds the stream shard and this process has seen its heartbeat advance.
    pub(crate) fn is_alive(&self, shard: &str, now: Duration) -> bool {
        self.is_held(shard, now) && self.seen.get(shard).is_some_and(|beat| beat.has_advanced)
    }
}

/// The stream shards that this daemon should claim now: free ones up to its fair share. If none is
/// free, one of a daemon that has too many. `is_mine` says which ones this daemon follows: a claim whose
/// reply was lost has an owner that does not know about it.
pub(crate) fn claims<'a>(
    readable: &[&'a StreamShard],
    checkpoints: &BTreeMap<String, Checkpoint>,
    heartbeats: &Heartbeats,
    me: &str,
    is_mine: impl Fn(&str) -> bool,
    now: Duration,
) -> Vec<&'a StreamShard> {
    let owner =
        |shard: &StreamShard| checkpoints.get(&shard.id).and_then(|one| one.owner.as_deref());
    let mut held: BTreeMap<&str, Vec<&'a StreamShard>> = BTreeMap::from([(me, Vec::new())]);
    let mut free = Vec::new();
    for shard in readable {
        match owner(shard) {
            _ if is_mine(&shard.id) => held.entry(me).or_default().push(shard),
            Some(owner) if owner != me && heartbeats.is_held(&shard.id, now) => {
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
        StreamShard { id: id.to_owned(), parent: parent.map(str::to_owned), end: End::Open }
    }

    fn checkpoint(owner: Option<&str>, beat: i64, done: bool) -> Checkpoint {
        Checkpoint { owner: owner.map(str::to_owned), beat, done, ..Checkpoint::default() }
    }

    type Checkpoints<'a> = &'a [(&'a str, Checkpoint)];

    fn map(checkpoints: Checkpoints<'_>) -> BTreeMap<String, Checkpoint> {
        let named = |id: &str, one: &Checkpoint| Checkpoint { shard: id.to_owned(), ..one.clone() };
        checkpoints.iter().map(|(id, one)| ((*id).to_owned(), named(id, one))).collect()
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
            let found = readable(&shards, &map(&done), "", |_| false);
            let found: Vec<&str> = found.iter().map(|shard| shard.id.as_str()).collect();
            assert_eq!(found, wanted, "{done:?}");
        };
        check(&[], &["old"]);
        check(&["old"], &["left", "right"]);
        check(&["old", "left"], &["right", "leaf"]);
        check(&["old", "left", "right", "leaf"], &[]);
    }

    #[test]
    fn a_child_is_read_while_another_daemon_archives_events_of_its_parent() {
        let shards = [shard("old", None), shard("new", Some("old"))];
        let kept = |stream: &str| {
            let stream = stream.to_owned();
            map(&[("old", Checkpoint { read: true, stream, ..checkpoint(Some("you"), 1, false) })])
        };
        let count =
            |kept: BTreeMap<String, Checkpoint>| readable(&shards, &kept, "2", |_| false).len();
        assert_eq!((count(kept("2")), count(kept("1"))), (2, 1), "an id of an earlier stream");
    }

    #[test]
    fn a_table_is_archived_until_the_stream_has_none_of_the_events() {
        let at = Timestamp::from_millis(1_000_000);
        let is_archived = |archived_at, now: Timestamp| {
            let one = Checkpoint { archived_at, ..checkpoint(None, 1, false) };
            is_archived(&map(&[("a", one), ("b", checkpoint(None, 1, false))]), now)
        };
        let last = at.saturating_add(RETENTION).saturating_add(RETENTION);
        assert!(!is_archived(None, at) && is_archived(Some(at), at) && is_archived(Some(at), last));
        assert!(!is_archived(Some(at), last.saturating_add_millis(1)));
    }

    /// Which of the stream shards a to d the daemon `me` claims.
    fn taken(checkpoints: Checkpoints<'_>, still: Duration) -> Vec<String> {
        let shards = ["a", "b", "c", "d"].map(|id| shard(id, None));
        let readable: Vec<&StreamShard> = shards.iter().collect();
        let checkpoints = map(checkpoints);
        let mut beats = Heartbeats::new(TAKEOVER_AFTER);
        beats.observe(&checkpoints, Duration::ZERO);
        let is_mine =
            |id: &str| checkpoints.get(id).is_some_and(|one| one.owner.as_deref() == Some("me"));
        let taken = claims(&readable, &checkpoints, &beats, "me", is_mine, still);
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
    fn a_claim_whose_reply_was_lost_is_claimed_again() {
        let shards = [shard("a", None)];
        let checkpoints = map(&[("a", checkpoint(Some("me"), 1, false))]);
        let mut beats = Heartbeats::new(TAKEOVER_AFTER);
        beats.observe(&checkpoints, Duration::ZERO);
        let taken = claims(&[&shards[0]], &checkpoints, &beats, "me", |_| false, Duration::ZERO);
        assert_eq!(taken.len(), 1);
    }

    #[test]
    fn what_no_daemon_finished_is_looked_for_although_the_stream_lists_it_no_longer() {
        let checkpoints = map(&[
            ("open", checkpoint(None, 1, false)),
            ("done", checkpoint(None, 1, true)),
            ("later", Checkpoint { stream: "2".to_owned(), ..checkpoint(None, 1, false) }),
        ]);
        let found = with_unlisted(vec![shard("new", Some("open"))], &checkpoints, "1");
        let ids: Vec<&str> = found.iter().map(|shard| shard.id.as_str()).collect();
        assert_eq!(ids, ["new", "open"]);
        // Its child waits for it.
        let readable = readable(&found, &checkpoints, "", |_| false);
        assert_eq!(readable.iter().map(|shard| shard.id.as_str()).collect::<Vec<_>>(), ["open"]);
    }

    #[test]
    fn a_generation_that_nobody_saw_is_missed_only_after_a_day_without_daemons() {
        let at = Timestamp::from_millis(1_000_000);
        let old = Checkpoint { seen_at: Some(at), read_to: Some(at), ..checkpoint(None, 1, true) };
        let checkpoints = map(&[("old", old)]);
        let shards = [shard("new", Some("unseen")), shard("child", Some("old"))];
        let seen_at = |of: usize, now: Timestamp| {
            new_checkpoint(&shards[of], &shards, &checkpoints, "", now).seen_at
        };
        let soon = at.saturating_add(RETENTION);
        assert_eq!([0, 1].map(|shard| seen_at(shard, soon)), [Some(soon); 2]);
        let later = soon.saturating_add_millis(1);
        assert_eq!([0, 1].map(|shard| seen_at(shard, later)), [Some(at); 2]);
        assert!(has_missed(Some(at), later) && !has_missed(Some(at), soon));
        let first = new_checkpoint(&shards[0], &shards, &BTreeMap::new(), "", later);
        assert_eq!(first.seen_at, Some(later), "the first daemon has missed nothing");
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
