//! Checks splits and merges of shards: no token and no time is gained or lost.

use super::reading::{Cell, Reading};

/// A shard before and after a write.
pub(super) struct Change<'a> {
    pub(super) old: Option<&'a Reading>,
    pub(super) new: &'a Reading,
}

/// Whether two changes in one transaction are a split or a merge: the shard count of one of them
/// has changed.
pub(super) fn is_reshard(changes: &[Change<'_>]) -> bool {
    let counts_otherwise =
        |change: &Change<'_>| change.old.is_some_and(|old| old.count != change.new.count);
    changes.len() == 2 && changes.iter().any(counts_otherwise)
}

/// Checks a split or a merge. With `onto_stray` the new shard may exist already: a client of the
/// original has created it outside of the bucket.
pub(super) fn check(changes: &[Change<'_>], onto_stray: bool) -> Result<(), String> {
    let [low, high] = changes else { return Err("not two shards".to_owned()) };
    let (low, high) = if low.new.shard < high.new.shard { (low, high) } else { (high, low) };
    let old = low.old.ok_or("nothing was split")?;
    let (before, after) = (old.count, low.new.count);
    if after == 2 * before && high.new.count == after && high.new.shard == low.new.shard + before {
        return check_split(old, low.new, high, onto_stray);
    }
    if 2 * after == before && high.new.count == after && high.new.shard == low.new.shard + after {
        return check_merge(old, low.new, high);
    }
    Err(format!("shards that do not belong together: {before} to {after}"))
}

fn check_split(
    old: &Reading,
    low: &Reading,
    high: &Change<'_>,
    onto_stray: bool,
) -> Result<(), String> {
    if high.old.is_some_and(Reading::holds_share) && !onto_stray {
        return Err("split onto a shard that exists".to_owned());
    }
    if low.rf != old.rf || high.new.rf != old.rf {
        return Err("a split changed the refill time".to_owned());
    }
    same_limits(old, [low, high.new])?;
    same_moment(old.limits_at, [low, high.new])?;
    for (limit, cell) in &old.cells {
        let (low, new) = pair(limit, low, high.new)?;
        // Tokens above the ceiling, which other clients may add, do not count.
        let tokens = cell.tokens.min(cell.rate.capacity().get());
        same(limit, "tokens", tokens.into(), i128::from(low.tokens) + i128::from(new.tokens))?;
        same(limit, "remainder", cell.remainder.into(), i128::from(low.remainder))?;
        same(limit, "remainder of the new shard", 0, new.remainder.into())?;
        unconsumed(limit, Some(cell), low)?;
        unconsumed(limit, high.old.and_then(|old| old.cells.get(limit)), new)?;
        ceilings(limit, cell, [low, new])?;
    }
    Ok(())
}

fn check_merge(old: &Reading, low: &Reading, high: &Change<'_>) -> Result<(), String> {
    let at = low.rf;
    if at < old.rf || high.old.is_some_and(|high| at < high.rf) {
        return Err("the refill time ran back".to_owned());
    }
    // Only shards with the same limits merge. The merged shard has the later `limits_at`.
    let newest = high.old.and_then(|high| high.limits_at).max(old.limits_at);
    same_limits(old, high.old.into_iter().chain([low]))?;
    same_moment(newest, [low])?;
    for (limit, cell) in &old.cells {
        let (new, retired) = pair(limit, low, high.new)?;
        let other = high.old.and_then(|high| Some((high.rf, *high.cells.get(limit)?)));
        let (mut tokens, mut fraction) = held(cell, old.rf, at);
        if let Some((rf, other)) = &other {
            let (more, further) = held(other, *rf, at);
            (tokens, fraction) = (tokens + more, fraction + further);
        }
        let period = i128::from(cell.rate.period_ms());
        let (tokens, fraction) = (tokens + fraction / period, fraction % period);
        let ceiling = i128::from(new.rate.capacity().get());
        same(limit, "tokens", tokens.min(ceiling), new.tokens.into())?;
        if tokens < ceiling {
            same(limit, "remainder", fraction, new.remainder.into())?;
        }
        same(limit, "tokens of the retired shard", 0, retired.tokens.into())?;
        if let Some(ttl) = low.ttl.filter(|_| old.ttl.is_none()) {
            full_by(limit, new, at, ttl)?;
        }
        unconsumed(limit, Some(cell), new)?;
        unconsumed(limit, other.as_ref().map(|(_, other)| other), retired)?;
    }
    Ok(())
}

/// An item that gets an expiry must be full by then, because an absent bucket counts as full.
fn full_by(limit: &str, cell: &Cell, rf: i64, ttl: i64) -> Result<(), String> {
    let (tokens, _) = held(cell, rf, ttl * 1_000);
    match tokens == i128::from(cell.rate.capacity().get()) {
        true => Ok(()),
        false => Err(format!("{limit}: expires at {ttl} s and is not full by then")),
    }
}

/// Neither a split nor a merge changes the limits.
fn same_limits<'a>(
    old: &Reading,
    others: impl IntoIterator<Item = &'a Reading>,
) -> Result<(), String> {
    for other in others {
        let rates = other.cells.iter().map(|(limit, cell)| (limit, cell.whole));
        if !rates.eq(old.cells.iter().map(|(limit, cell)| (limit, cell.whole))) {
            return Err(format!("other limits after a split: {other:#?}"));
        }
    }
    Ok(())
}

fn same_moment<'a>(
    limits_at: Option<i64>,
    others: impl IntoIterator<Item = &'a Reading>,
) -> Result<(), String> {
    for other in others {
        if other.limits_at != limits_at {
            let after = other.limits_at;
            return Err(format!("limits of {after:?} after a split, must be {limits_at:?}"));
        }
    }
    Ok(())
}

/// The balance of a shard at a time, and the fraction of a millitoken.
fn held(cell: &Cell, rf: i64, at: i64) -> (i128, i128) {
    let (earned, remainder) = cell.rate.earned(u64::try_from(at - rf).unwrap_or(0), cell.remainder);
    let tokens = i128::from(cell.tokens) + i128::from(earned.get());
    let ceiling = i128::from(cell.rate.capacity().get());
    if tokens >= ceiling { (ceiling, 0) } else { (tokens, remainder.into()) }
}

fn pair<'a>(
    limit: &str,
    one: &'a Reading,
    other: &'a Reading,
) -> Result<(&'a Cell, &'a Cell), String> {
    let both = one.cells.get(limit).zip(other.cells.get(limit));
    both.ok_or_else(|| format!("{limit}: lost by a split"))
}

fn same(limit: &str, what: &str, left: i128, right: i128) -> Result<(), String> {
    match left == right {
        true => Ok(()),
        false => Err(format!("{limit}: {what} are {right} after a split, must be {left}")),
    }
}

fn unconsumed(limit: &str, old: Option<&Cell>, new: &Cell) -> Result<(), String> {
    let before = old.map_or(0, |old| old.consumed);
    same(limit, "net consumption", before.into(), new.consumed.into())
}

fn ceilings(limit: &str, old: &Cell, new: [&Cell; 2]) -> Result<(), String> {
    let of = |cell: &Cell| {
        [cell.rate.capacity(), cell.rate.refill_amount()].map(|amount| i128::from(amount.get()))
    };
    let ([a, b], [c, d]) = (of(new[0]), of(new[1]));
    let [ceiling, amount] = of(old);
    same(limit, "ceilings", ceiling, a + c)?;
    same(limit, "rates", amount, b + d)
}
