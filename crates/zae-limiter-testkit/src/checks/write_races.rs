//! Conditional writes of many callers at once, on several threads.

use std::sync::Arc;

use zae_limiter_core::{ConfigLevel, Precondition, Record, Store, Write, Written};

use super::concurrency::{TASKS, crowd};
use crate::calls::{get, put, write};
use crate::given::{config, entity};

pub async fn one_of_many_conditional_writes_wins(store: Arc<dyn Store>) {
    for run in 0..10 {
        let id = format!("e-{run}");
        let written = crowd(&store, |number, store| {
            let record = entity(&id, Some(&format!("parent-{number}")));
            async move {
                let mark = entity(&format!("mark-{run}-{number}"), None);
                let batch = [
                    Write::Put(mark, Precondition::Always),
                    Write::Put(record, Precondition::Absent),
                ];
                write(&*store, &batch).await
            }
        })
        .await;
        let winners: Vec<usize> =
            (0..TASKS).filter(|number| written[*number] == Written::Done).collect();
        assert_eq!(winners.len(), 1, "winners of run {run}: {winners:?}");
        let parent = format!("parent-{}", winners[0]);
        let found = get(&*store, entity(&id, None).key()).await;
        assert_eq!(found, Some(entity(&id, Some(&parent))), "the winner's record");
        for (number, written) in written.iter().enumerate() {
            let mark = get(&*store, entity(&format!("mark-{run}-{number}"), None).key()).await;
            assert_eq!(mark.is_some(), *written == Written::Done, "nothing of a loser's batch");
        }
    }
}

pub async fn one_of_many_writes_of_a_version_wins(store: Arc<dyn Store>) {
    put(&*store, [config(ConfigLevel::System, 0)]).await;
    let rises = crowd(&store, |_, store| async move {
        let mut rises = 0;
        // Read, then write if nobody else has: lost updates would show in the sum.
        for _ in 0..10 {
            let found = get(&*store, config(ConfigLevel::System, 0).key()).await;
            let version = found.and_then(Record::into_config).expect("the config").version;
            let next = config(ConfigLevel::System, version + 1);
            let batch = [Write::Put(next, Precondition::Version(version))];
            rises += u64::from(write(&*store, &batch).await == Written::Done);
        }
        rises
    })
    .await;
    let found = get(&*store, config(ConfigLevel::System, 0).key()).await;
    let version = found.and_then(Record::into_config).expect("the config").version;
    assert_eq!(rises.iter().sum::<u64>(), version, "each winner raised the version by one");
}
