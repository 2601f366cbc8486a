//! Our client against our server, over a real socket.

use std::sync::Arc;

use bytes::Bytes;
use sapwood_net::evergreen::Request;
use sapwood_proto::evergreen::Metadata;

use super::Running;

#[tokio::test]
async fn an_echo_goes_through_the_whole_house_and_comes_back() {
    let server = Running::with_test_functions().await;
    let session = server.session().await;
    assert!(session.announces("cancel") && session.announces("list-actions"));
    let mut text = session.write().unwrap();
    let call = session
        .call(Request {
            name: "echo".into(),
            inputs: vec![("text".into(), text.node().clone())],
            outputs: vec!["response".into()],
            ..Request::default()
        })
        .unwrap();
    let mut response = call.output("response").unwrap().read();
    let metadata = Arc::new(Metadata::of("text/plain").with_role("USER"));
    for word in ["ein ", "zwei ", "drei"] {
        text.write(&metadata, Bytes::from_static(word.as_bytes()))
            .await
            .unwrap();
        let piece = response.next().await.unwrap().unwrap();
        assert_eq!(piece.data, word);
        assert_eq!(
            (&*piece.metadata.mimetype, &*piece.metadata.role),
            ("text/plain", "USER")
        );
    }
    text.end(&metadata).unwrap();
    assert!(response.next().await.is_none());
    drop((response, call));
    session.close().await.unwrap();
}
