//! The guides, as they stand in the repository under `docs/`.
//!
//! Links between the guides work in the repository; here use the list of modules.

#![allow(rustdoc::broken_intra_doc_links, reason = "links between the guides are links to files")]

macro_rules! guides {
    ($($(#[$doc:meta])* $name:ident: $file:literal;)+) => {$(
        $(#[$doc])*
        ///
        #[doc = include_str!(concat!("../../../docs/", $file))]
        pub mod $name {}
    )+};
}

guides! {
    /// First steps.
    getting_started: "getting-started.md";
    /// Limits, bursts, refusals.
    limits_and_bursts: "limits-and-bursts.md";
    /// Estimates, and settling for the actual cost.
    llm_settling: "llm-settling.md";
    /// Keys below projects below organisations.
    hierarchies: "hierarchies.md";
    /// Where limits are stored, and which of them hold.
    configuration_levels: "configuration-levels.md";
    /// Several limiters in one store.
    namespaces: "namespaces.md";
    /// What happens when the store does not answer.
    unavailability: "unavailability.md";
    /// Which store for what.
    choosing_a_store: "choosing-a-store.md";
    /// The DynamoDB store: table, cost, permissions.
    dynamodb: "dynamodb.md";
    /// Usage from the change stream.
    aggregator: "aggregator.md";
    /// Running it.
    operations: "operations.md";
}
