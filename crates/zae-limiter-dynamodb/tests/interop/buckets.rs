//! Buckets that both take from.

use serde_json::json;
use zae_limiter_core::Limit;

use crate::both::{Both, Kind, json_of, rpm};

pub(crate) async fn taken_in_turn(both: Both) {
    both.ours.set_system_defaults([rpm(100, 100)], None).await.unwrap();
    for (entity, ours_first) in [("ours-first", true), ("python-first", false)] {
        let mut left = 100;
        let mut is_ours = ours_first;
        for tokens in [10, 7, 1, 30, 2, 13, 5, 20] {
            let is_admitted = match is_ours {
                true => both.take(entity, tokens).await,
                false => both.python_takes(entity, tokens),
            };
            assert!(is_admitted, "{tokens} of {left}");
            left -= i64::try_from(tokens).unwrap();
            assert_eq!(both.available(entity).await, left);
            assert_eq!(both.balance(entity).await, left * 1_000);
            assert_eq!(both.numbers(entity).await["b_rpm_tc"], (100 - left) * 1_000);
            is_ours = !is_ours;
        }
        assert_eq!(left, 12);
        assert!(!both.take(entity, 13).await);
        assert!(!both.python_takes(entity, 13));
        assert!(both.take(entity, 6).await);
        assert!(both.python_takes(entity, 6));
        assert!(!both.take(entity, 1).await);
        assert!(!both.python_takes(entity, 1));
        assert_eq!(both.balance(entity).await, 0);
        // On limits of the system it expires: both know when.
        assert!(both.numbers(entity).await.contains_key("ttl"));
    }
}

pub(crate) async fn refilled_over_time(both: Both) {
    // One a second.
    both.ours.set_system_defaults([rpm(60, 60)], None).await.unwrap();
    for (entity, ours_first) in [("ours-first", true), ("python-first", false)] {
        let mut is_ours = ours_first;
        let take = async |is_ours: bool, tokens| match is_ours {
            true => both.take(entity, tokens).await,
            false => both.python_takes(entity, tokens),
        };
        assert!(take(is_ours, 60).await);
        for seconds in [10, 1, 7, 30, 3, 59] {
            assert!(!take(is_ours, 1).await && !take(!is_ours, 1).await);
            both.pass(seconds);
            assert_eq!(both.available(entity).await, i64::try_from(seconds).unwrap());
            assert!(!take(is_ours, seconds + 1).await && !take(!is_ours, seconds + 1).await);
            is_ours = !is_ours;
            assert!(take(is_ours, seconds).await, "{seconds} after as many seconds");
        }
        // Full is full, however long it takes.
        both.pass(200);
        assert_eq!(both.available(entity).await, 60);
        assert!(take(is_ours, 60).await);
        assert!(!take(is_ours, 1).await && !take(!is_ours, 1).await);
    }
}

pub(crate) async fn debt(both: Both) {
    both.ours.set_system_defaults([rpm(60, 60)], None).await.unwrap();
    // Ours, which Python waits for.
    let mut lease = both.lease("a", &[("rpm", 40)]).await.unwrap();
    lease.adjust("rpm", 50).unwrap();
    lease.commit().await.unwrap();
    // Python's, which we wait for.
    assert!(both.python_begins("b", 40));
    both.python("end", json!({"lease": "b", "adjust": {"rpm": 50}}));
    for entity in ["a", "b"] {
        assert_eq!(both.available(entity).await, -30);
        assert_eq!(both.numbers(entity).await["b_rpm_tc"], 90_000);
    }
    both.pass(30);
    for entity in ["a", "b"] {
        assert_eq!(both.available(entity).await, 0);
        assert!(!both.take(entity, 1).await && !both.python_takes(entity, 1));
    }
    both.pass(2);
    assert!(both.python_takes("a", 2) && both.take("b", 2).await);
    assert!(!both.take("a", 1).await && !both.python_takes("b", 1));

    // An estimate that was too high comes back to the other.
    both.pass(60);
    let mut lease = both.lease("a", &[("rpm", 60)]).await.unwrap();
    assert!(both.python_begins("b", 60));
    assert!(!both.python_takes("a", 1) && !both.take("b", 1).await);
    lease.adjust("rpm", -25).unwrap();
    lease.commit().await.unwrap();
    both.python("end", json!({"lease": "b", "adjust": {"rpm": -25}}));
    assert!(both.python_takes("a", 25) && both.take("b", 25).await);
    assert!(!both.take("a", 1).await && !both.python_takes("b", 1));
}

pub(crate) async fn rollback(both: Both) {
    both.ours.set_system_defaults([rpm(100, 1)], None).await.unwrap();
    // Python gives up while we take, and the other way round.
    for entity in ["new", "old"] {
        if entity == "old" {
            assert!(both.take(entity, 10).await);
        }
        let before = both.available(entity).await;
        assert!(both.python_begins(entity, 40));
        assert!(both.take(entity, 30).await);
        assert!(!both.take(entity, 31).await);
        both.python("end", json!({"lease": entity, "give_up": true}));
        assert_eq!(both.available(entity).await, before - 30);

        let lease = both.lease(entity, &[("rpm", 40)]).await.unwrap();
        assert!(both.python_takes(entity, 10));
        assert!(!both.python_takes(entity, 40));
        lease.rollback().await.unwrap();
        assert_eq!(both.available(entity).await, before - 40);
        let numbers = both.numbers(entity).await;
        assert_eq!(numbers["b_rpm_tk"] + numbers["b_rpm_tc"], 100_000, "nothing lost or made");
    }
}

pub(crate) async fn several_limits(both: Both) {
    let limits = || [rpm(10, 10), Limit::per_minute("tpm", 1_000)];
    both.ours.set_system_defaults(limits(), None).await.unwrap();
    let python = |entity: &str, rpm: u64, tpm: u64| {
        let take = json!({"rpm": rpm, "tpm": tpm});
        both.try_python("acquire", json!({"entity": entity, "resource": "gpt-4", "take": take}))
    };
    let ours = async |entity: &str, rpm, tpm| {
        let lease = both.lease(entity, &[("rpm", rpm), ("tpm", tpm)]).await;
        match lease {
            Some(lease) => lease.commit().await.map(|()| true).unwrap(),
            None => false,
        }
    };
    assert!(ours("a", 1, 600).await);
    // All or nothing.
    assert!(!ours("a", 1, 401).await);
    assert_eq!(python("a", 1, 401), Ok(false.into()));
    assert_eq!(python("a", 1, 400), Ok(true.into()));
    assert_eq!(both.balance("a").await, 8_000);
    assert!(!ours("a", 1, 1).await);
    // One that names only one of them leaves the other alone.
    assert!(both.python_takes("a", 1) && both.take("a", 1).await);
    assert_eq!(both.numbers("a").await["b_tpm_tk"], 0);
    // Time is paid to both.
    both.pass(6);
    assert!(ours("a", 1, 100).await);
}

/// A team and a member of it that takes from both.
pub(crate) async fn cascade_of_ours(both: Both) {
    both.ours.set_system_defaults([rpm(100, 1)], None).await.unwrap();
    both.ours.create_entity("team").await.unwrap();
    both.ours.create_entity("member").parent("team").cascade().await.unwrap();
    both.ours.create_entity("guest").parent("team").await.unwrap();
    both.ours.set_limits("team", Some("gpt-4"), [rpm(50, 1)]).await.unwrap();
    cascades(&both, true).await;
}

pub(crate) async fn cascade_of_python(both: Both) {
    both.python("set_system", json!({"limits_": json_of([rpm(100, 1)])}));
    both.python("create_entity", json!({"entity": "team"}));
    both.python("create_entity", json!({"entity": "member", "parent": "team", "cascade": true}));
    both.python("create_entity", json!({"entity": "guest", "parent": "team"}));
    let more = json!({"entity": "team", "resource": "gpt-4", "limits_": json_of([rpm(50, 1)])});
    both.python("set_limits", more);
    cascades(&both, false).await;
}

async fn cascades(both: &Both, ours_first: bool) {
    let take = async |is_ours: bool, entity: &str, tokens| match is_ours {
        true => both.take(entity, tokens).await,
        false => both.python_takes(entity, tokens),
    };
    let left = async |member: i64, team: i64| {
        assert_eq!((both.available("member").await, both.available("team").await), (member, team));
    };
    // The buckets are made by one, and the copies on them lead the other to the parent.
    assert!(take(ours_first, "member", 10).await);
    left(90, 40).await;
    let item = both.item("member").await;
    assert_eq!(item["cascade"].as_bool(), Ok(&true));
    assert_eq!(item["parent_id"].as_s(), Ok(&"team".to_owned()));
    assert!(take(!ours_first, "member", 10).await);
    left(80, 30).await;
    assert!(take(ours_first, "member", 10).await);
    // Now the fast way of Python, which knows the parent.
    assert!(take(!ours_first, "member", 5).await);
    left(65, 15).await;
    // The parent refuses both, and nothing is taken.
    assert!(!take(true, "member", 16).await && !take(false, "member", 16).await);
    left(65, 15).await;
    // No cascade, no parent.
    assert!(take(ours_first, "guest", 10).await && take(!ours_first, "guest", 10).await);
    assert_eq!(both.available("guest").await, 80);
    left(65, 15).await;
    // What the one takes from the parent the other's children do not have.
    assert!(take(ours_first, "team", 15).await);
    assert!(!take(true, "member", 1).await && !take(false, "member", 1).await);
    left(65, 0).await;
    // Given back on all levels.
    both.pass(60 * 15);
    left(80, 15).await;
    assert!(both.python_begins("member", 15));
    assert!(!both.take("member", 1).await);
    both.python("end", json!({"lease": "member", "give_up": true}));
    let lease = both.lease("member", &[("rpm", 15)]).await.unwrap();
    assert!(!both.python_takes("member", 1));
    lease.rollback().await.unwrap();
    left(80, 15).await;
}

pub(crate) async fn limits_change_under_buckets(both: Both) {
    let set = async |is_ours: bool, entity: &str, limit: Limit| match is_ours {
        true => drop(both.ours.set_limits(entity, Some("gpt-4"), [limit]).await.unwrap()),
        false => {
            let more = json!({"entity": entity, "resource": "gpt-4", "limits_": json_of([limit])});
            both.python("set_limits", more);
        }
    };
    let take = async |is_ours: bool, entity: &str, tokens| match is_ours {
        true => both.take(entity, tokens).await,
        false => both.python_takes(entity, tokens),
    };
    for (entity, we_set) in [("we-set", true), ("python-sets", false)] {
        set(!we_set, entity, rpm(100, 60)).await;
        assert!(take(!we_set, entity, 10).await && take(we_set, entity, 10).await);
        both.pass(1);
        // More room is not more tokens. We pay out the time until then at the old rate; Python leaves
        // it to the new one.
        set(we_set, entity, rpm(200, 120)).await;
        assert_eq!(both.numbers(entity).await["b_rpm_cp"], 200_000, "{entity}");
        let left = if we_set { 81 } else { 82 };
        assert_eq!(both.available(entity).await, left, "{entity}");
        both.pass(10);
        assert_eq!(both.available(entity).await, left + 20, "{entity}");
        assert!(take(!we_set, entity, 50).await);
        assert_eq!(both.available(entity).await, left - 30, "{entity}");
        // Less room than tokens: what is too much goes, at the latest with the next refill of ours.
        set(we_set, entity, rpm(20, 60)).await;
        assert!(take(true, entity, 5).await);
        assert_eq!(both.available(entity).await, 15, "{entity}");
        assert!(take(false, entity, 15).await);
        assert!(!take(true, entity, 1).await && !take(false, entity, 1).await);
        assert!(!both.numbers(entity).await.contains_key("ttl"), "with limits of its own");
    }
    // Limits for all are followed by the next taker.
    both.ours.set_resource_defaults("gpt-4", [rpm(100, 60)]).await.unwrap();
    assert!(both.python_takes("e", 10));
    both.python("set_resource", json!({"resource": "gpt-4", "limits_": json_of([rpm(50, 60)])}));
    assert!(both.take("e", 10).await);
    assert_eq!(both.numbers("e").await["b_rpm_cp"], 50_000);
    assert_eq!(both.balance("e").await, 40_000);
}

pub(crate) async fn remainders(both: Both) {
    let daily = || Limit::per_day("tpd", 1_000);
    both.ours.set_system_defaults([rpm(60, 60), daily()], None).await.unwrap();
    let ours = async |rpm, tpd| {
        let lease = both.lease("a", &[("rpm", rpm), ("tpd", tpd)]).await.unwrap();
        lease.commit().await.unwrap();
    };
    ours(60, 500).await;
    both.pass(1);
    ours(1, 0).await;
    // A second earns 11.57 millitokens a day's limit: the rest is kept.
    let numbers = both.numbers("a").await;
    assert_eq!(numbers["b_tpd_tk"], 500_000 + 11);
    assert_eq!(numbers["b_tpd_rm"], 1_000 * 1_000_000 - 11 * 86_400_000);
    assert_eq!(numbers["rm_at"], numbers["rf"]);
    both.pass(1);
    // Python refills and leaves our attributes alone, which then belong to another time.
    assert!(both.python_takes("a", 1));
    let after = both.numbers("a").await;
    assert!(after["rf"] > numbers["rf"]);
    assert_eq!(after["rm_at"], numbers["rm_at"]);
    assert_eq!(after["b_tpd_rm"], numbers["b_tpd_rm"]);
    assert_eq!(after["b_rpm_tk"], 0);
    both.pass(1);
    // We go on by what Python left, without the remainder.
    let elapsed = both.clock_ms() - after["rf"];
    ours(1, 0).await;
    let last = both.numbers("a").await;
    assert_eq!(last["b_tpd_tk"], after["b_tpd_tk"] + elapsed * 1_000_000 / 86_400_000);
    assert_eq!(last["b_tpd_rm"], elapsed * 1_000_000 % 86_400_000);
    assert_eq!(last["rm_at"], last["rf"]);
    assert_eq!(last["b_rpm_tk"], 0);
}

pub(crate) async fn lists_of_buckets(both: Both) {
    both.ours.set_system_defaults([rpm(100, 1)], None).await.unwrap();
    assert!(both.take("a", 10).await && both.python_takes("b", 20));
    let ours = both.ours.resource_capacity("gpt-4", "rpm").await.unwrap();
    assert_eq!((ours.entities, ours.capacity, ours.available), (2, 200, 170));
    let python = both.python("capacity", json!({"resource": "gpt-4", "limit": "rpm"}));
    // It reads buckets off the index, and finds only keys on ours.
    let wanted = match both.kind {
        Kind::Ours => json!([0, 0, 0]),
        Kind::Theirs => json!([200, 170, 2]),
    };
    assert_eq!(python, wanted);
}

/// Python's credits are unconditional, and make an item where there is none.
pub(crate) async fn deleted_under_a_lease(both: Both) {
    both.ours.set_system_defaults([rpm(100, 1)], None).await.unwrap();
    both.ours.create_entity("a").await.unwrap();
    assert!(both.python_begins("a", 10));
    both.ours.delete_entity("a").await.unwrap();
    both.python("end", json!({"lease": "a", "give_up": true}));
    // Whatever is there now: it is not in our way.
    let statuses = both.ours.available("a", "gpt-4", &[]).await.unwrap();
    assert_eq!(statuses[0].available.get(), 100_000);
    assert!(both.take("a", 60).await);
    assert!(!both.take("a", 41).await);
    assert_eq!(both.available("a").await, 40);
    assert!(both.python_takes("a", 40));
    assert!(!both.take("a", 1).await && !both.python_takes("a", 1));
}

/// The same for a limit that the bucket no longer has.
pub(crate) async fn limit_deleted_under_a_lease(both: Both) {
    let of_tokens = || Limit::per_minute("tpm", 1_000);
    both.ours.set_limits("a", Some("gpt-4"), [rpm(100, 1), of_tokens()]).await.unwrap();
    let take = json!({"rpm": 10, "tpm": 100});
    let more = json!({"lease": "a", "entity": "a", "resource": "gpt-4", "take": take});
    assert_eq!(both.python("begin", more), true);
    both.ours.set_limits("a", Some("gpt-4"), [rpm(100, 1)]).await.unwrap();
    assert!(!both.numbers("a").await.contains_key("b_tpm_tk"));
    both.python("end", json!({"lease": "a", "give_up": true}));
    assert!(both.take("a", 60).await);
    assert!(!both.take("a", 41).await);
    assert!(both.python_takes("a", 40));
    // When it comes back it is full, as any new one.
    both.ours.set_limits("a", Some("gpt-4"), [rpm(100, 1), of_tokens()]).await.unwrap();
    let lease = both.lease("a", &[("tpm", 1_000)]).await.unwrap();
    lease.commit().await.unwrap();
    assert!(both.lease("a", &[("tpm", 1)]).await.is_none());
}

/// Python refunds above the ceiling.
pub(crate) async fn credits_above_the_ceiling(both: Both) {
    both.ours.set_system_defaults([rpm(60, 60)], None).await.unwrap();
    assert!(both.python_begins("a", 40));
    both.pass(60);
    assert!(both.take("a", 1).await);
    both.python("end", json!({"lease": "a", "give_up": true}));
    assert_eq!(both.balance("a").await, 99_000);
    let statuses = both.ours.available("a", "gpt-4", &[]).await.unwrap();
    assert_eq!(statuses[0].available.get(), 60_000);
    assert!(both.take("a", 60).await);
    assert!(!both.take("a", 1).await && !both.python_takes("a", 1));
}

/// Python splits a bucket when the reserved limit is short, which its fast way does not refill.
pub(crate) async fn many_writes_split_nothing(both: Both) {
    both.ours.set_system_defaults([rpm(10_000, 1)], None).await.unwrap();
    assert!(both.python_takes("a", 100));
    assert!(both.take("a", 1).await);
    // As after a thousand writes, over however long a time.
    both.put_number("a", "b_wcu_tk", 2_000).await;
    for _ in 0..3 {
        both.clock.advance(std::time::Duration::from_millis(500));
        assert!(both.take("a", 1).await);
    }
    let numbers = both.numbers("a").await;
    assert!(numbers["b_wcu_tk"] >= 1_000, "{numbers:?}");
    both.pass(1);
    assert!(both.python_takes("a", 1));
    assert_eq!(both.numbers("a").await["shard_count"], 1);
}
