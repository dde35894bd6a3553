//! Lists over several pages of the store.

use zae_limiter::Limit;

use crate::session::Session;

/// More than three pages of the library, and more than one of the store's largest.
const COUNT: usize = 1_700;

fn in_a_runtime<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn many_children() -> Session {
    let session = Session::new();
    in_a_runtime(async {
        let limiter = session.limiter().await;
        limiter.create_entity("p").await.unwrap();
        for n in 0..COUNT {
            limiter.create_entity(&format!("key-{n:04}")).parent("p").await.unwrap();
        }
    });
    session
}

fn ids(document: &serde_json::Value) -> Vec<&str> {
    document.as_array().unwrap().iter().map(|item| item["entity_id"].as_str().unwrap()).collect()
}

#[test]
fn every_page_is_listed_once() {
    let mut session = many_children();
    let wanted: Vec<String> = (0..COUNT).map(|n| format!("key-{n:04}")).collect();

    let (status, text, _) = session.run_unseen("entity children p", usize::MAX);
    assert_eq!(status, 0);
    let rows: Vec<&str> =
        text.lines().skip(1).map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(rows, wanted);
    assert_eq!(text.lines().filter(|line| line.starts_with("ENTITY")).count(), 1);

    let (status, text, _) = session.run_unseen("entity children p -o json", usize::MAX);
    assert_eq!(status, 0);
    let document: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(ids(&document), wanted);
    // Page by page it is the same document as in one piece.
    let at_once = serde_json::to_string_pretty(&document).unwrap();
    assert_eq!(text.lines().count(), at_once.lines().count());

    // A closed pipe is not an error.
    for line in ["entity children p", "entity children p -o json"] {
        let (status, text, talk) = session.run_unseen(line, 1_000);
        assert_eq!((status, text.len(), talk.as_str()), (0, 1_000, ""), "{line}");
    }
}

#[test]
fn a_long_list_within_a_document() {
    let mut session = Session::new();
    in_a_runtime(async {
        let limiter = session.limiter().await;
        limiter.set_resource_defaults("gpt-4", [Limit::per_minute("rpm", 4)]).await.unwrap();
        for n in 0..COUNT {
            let id = format!("key-{n:04}");
            let lease = limiter.acquire(id.as_str(), "gpt-4").take("rpm", 1).await.unwrap();
            lease.commit().await.unwrap();
        }
    });
    let (status, text, _) = session.run_unseen("resource capacity gpt-4 rpm -o json", usize::MAX);
    assert_eq!(status, 0);
    let document: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(ids(&document["entities"]).len(), COUNT);
    assert_eq!(document["total_capacity"], 4 * COUNT);
    assert_eq!(document["total_available"], 3 * COUNT);
    assert_eq!(document["utilization"], 0.25);

    let (_, text, _) = session.run_unseen("resource capacity gpt-4 rpm", usize::MAX);
    assert_eq!(text.lines().count(), COUNT + 2);
    assert_eq!(text.lines().last().unwrap(), "TOTAL          5100      6800  25.0%");
}

#[test]
fn a_purge_shows_its_progress() {
    let mut session = many_children().on_a_terminal("y\n");
    session.env.insert("NO_COLOR".to_owned(), "1".to_owned());
    // No command can delete the namespace default; here it stands for any other.
    let id = in_a_runtime(async {
        let limiter = session.limiter().await;
        limiter.namespaces().delete("default").await.unwrap().id
    });
    session.run(&format!("namespace purge {id}"));
    insta::assert_snapshot!(session.transcript);
}
